"""Progress reporting: messages, progress bars and tables of work that takes a while."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Update: TypeAlias = Callable[[int, str], None]  # called with the number of steps done and a note
LOGGER = logging.getLogger("slimstate")


class Reporter:
    """Report progress. This class sends messages to the logger "slimstate"; override what you want to show.

    Examples:
        >>> class Printer(slimstate.Reporter):
        ...     def say(self, line):
        ...         print(line)
        >>> slimstate.prune("model", "slim", method="l1", progress=Printer())
    """

    def say(self, line: str) -> None:
        """Show one line."""
        LOGGER.info(line)

    def detail(self, line: str) -> None:
        """Show one line of diagnostics."""
        LOGGER.debug(line)

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        """Yield the items and show how many are done."""
        with self.meter(label, total) as update:
            update(0, "")
            for done, item in enumerate(items, start=1):
                yield item
                update(done, "")

    def waiting(self, label: str) -> AbstractContextManager[object]:
        """Show that work without countable steps is going on."""
        return nullcontext()

    def meter(self, label: str, total: int | None, later: int = 0) -> AbstractContextManager[Update]:
        """Show work that counts its own steps; the first update says where it starts.

        `later` is how many steps like these follow under other labels: the time left includes them.
        """
        return nullcontext(lambda done, note: None)

    def then(self, work: str) -> AbstractContextManager[object]:
        """Say beside the time left, while this is open, that other work follows."""
        return nullcontext()

    @contextmanager
    def table(self, columns: Sequence[str]) -> Iterator[Callable[[Sequence[str]], None]]:
        """Show a table that grows; call the result with the cells of each new row."""
        self.say("  ".join(columns))
        yield lambda cells: self.say("  ".join(cells))


class Pace:
    """Estimate the remaining time from all steps of this run, which is steady also where a step takes minutes.

    The time left of work within other work is that of the other work, `outer`. `follows` names work whose time is not
    known yet.
    """

    def __init__(
        self, label: str, total: int | None, later: int = 0, outer: "Pace | None" = None, follows: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.label, self.total, self.later, self.outer, self.clock = label, total, later, outer, clock
        self.follows = ", then ".join(["", *follows])
        self.start: tuple[int, float] | None = None
        self.done, self.time = 0, 0.0  # of the last update

    def update(self, done: int) -> None:
        self.done, self.time = done, self.clock()
        if self.start is None:
            self.start = done, self.time

    def left(self) -> str:
        """Return the remaining time, or an empty string where it is not known or nothing remains."""
        if self.outer is not None:
            return self.outer.left()
        first, started = self.start or (0, 0.0)
        if not self.total or not first < self.done < self.total + self.later:
            return ""
        seconds = (self.time - started) * (self.total + self.later - self.done) / (self.done - first)
        return f"{timedelta(seconds=max(0, round(seconds - self.clock() + self.time)))} left{self.follows}"

    def line(self, note: str) -> str:
        """Return the progress as one line, such as `calibrating 3/8  0:00:20 left`."""
        count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return "  ".join(part for part in (f"{self.label} {count}", note, self.left()) if part)


SILENT = Reporter()
