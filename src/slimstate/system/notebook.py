"""Progress in a notebook: what was said, and below it one line that changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from slimstate.system.console import Pace
from slimstate.system.progress import Reporter

T = TypeVar("T")
SECONDS_BETWEEN_UPDATES = 0.5


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook; that of a terminal has another shell."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookReporter(Reporter):
    """Lines as a cell prints them; what is under way in one line, which goes when it is done."""

    def say(self, line: str) -> None:
        print(line)

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        with self._line() as show:
            pace, of = Pace(total), "" if total is None else f" of {total}"
            for done, item in enumerate(items, start=1):
                yield item
                pace.step(done)
                show(f"{label} {done}{of}  {pace.left()}")

    @contextmanager
    def waiting(self, label: str) -> Iterator[object]:
        with self._line() as show:
            show(f"{label} …")
            yield None

    @contextmanager
    def meter(self, label: str, total: int) -> Iterator[Callable[[int, str], None]]:
        with self._line() as show:
            pace = Pace(total)
            begun: list[int] = []

            def tell(done: int, note: str) -> None:
                if not begun:
                    begun.append(done)
                    pace.begin(done)
                pace.step(done)
                show(f"{label} {done} of {total}  {note}  {pace.left()}")

            yield tell

    @contextmanager
    def table(self, columns: Sequence[str]) -> Iterator[Callable[[Sequence[str]], None]]:
        print("  ".join(columns))
        yield lambda cells: print("  ".join(cells))

    def _line(self) -> AbstractContextManager[Callable[[str], None]]:
        return _changing_line()


@contextmanager
def _changing_line() -> Iterator[Callable[[str], None]]:
    from IPython.display import Pretty, display

    handle: Any = display(Pretty(""), display_id=True)
    told = 0.0

    def show(line: str) -> None:
        nonlocal told
        if time.monotonic() - told >= SECONDS_BETWEEN_UPDATES:
            told = time.monotonic()
            handle.update(Pretty(line))

    try:
        yield show
    finally:
        handle.update(Pretty(""))
