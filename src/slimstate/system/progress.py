"""How long work speaks to whoever started it. Silent unless the caller gives another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")


class Reporter:
    """Says lines, follows loops and waits with you; this one is silent. One of your own overrides what it shows.

    Examples:
        >>> class Log(slimstate.Reporter):
        ...     def say(self, line):
        ...         logging.info(line)
        >>> slimstate.prune("model", "slim", method="l1", progress=Log())
    """

    def say(self, line: str) -> None:
        """One line a person should know of."""

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        """The same items, with progress shown."""
        yield from items

    def waiting(self, label: str) -> AbstractContextManager[object]:
        """Work that takes a while and has no steps to count."""
        return nullcontext()

    def meter(self, label: str, total: int) -> AbstractContextManager[Callable[[int, str], None]]:
        """Work that says itself how far it is: call what this gives with the steps done and a note."""
        return nullcontext(lambda done, note: None)

    def table(self, columns: Sequence[str]) -> AbstractContextManager[Callable[[Sequence[str]], None]]:
        """A table that grows while it is open: call what it gives with the cells of each new row."""
        return nullcontext(lambda cells: None)


SILENT = Reporter()
