"""Progress for people: lines and bars in a terminal, a line now and then where there is none.

Of several processes the main one speaks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from slimstate.system import distributed
from slimstate.system.progress import Reporter

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 10


class Pace:
    """How long the rest will take, by all that was done so far: steady where steps take seconds or minutes."""

    def __init__(self, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self._clock = total, clock
        self._began = clock()
        self._first = self._done = 0

    def begin(self, done: int) -> None:
        """What was done by an earlier run does not count for the pace of this one."""
        self._first = self._done = done
        self._began = self._clock()

    def step(self, done: int) -> None:
        self._done = done

    def left(self) -> str:
        """In words, or nothing where it cannot be said yet or all is done."""
        here = self._done - self._first
        if not self.total or here <= 0 or self._done >= self.total:
            return ""
        seconds = (self._clock() - self._began) * (self.total - self._done) / here
        return f"{timedelta(seconds=round(seconds))} left"


class _Left(ProgressColumn):
    """The estimate of the pace, which does not forget the first steps as rich's own does after half a minute."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(task.fields["pace"].left())


class Lines:
    """A line for the first step, for the last, and every ten seconds between them."""

    def __init__(self, say: Callable[[str], None], label: str, total: int | None) -> None:
        self._say, self._label, self._pace = say, label, Pace(total)
        self._told = time.monotonic()

    def begin(self, done: int) -> None:
        self._pace.begin(done)

    def step(self, done: int, note: str = "", *, always: bool = False) -> None:
        self._pace.step(done)
        if always or time.monotonic() - self._told >= SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            total = "" if self._pace.total is None else f"/{self._pace.total}"
            parts = (f"{self._label} {done}{total}", note, self._pace.left())
            self._say("  ".join(part for part in parts if part))


class TerminalReporter(Reporter):
    """Lines and progress bars on standard error; bars only where that is a terminal."""

    def __init__(self) -> None:
        self.console = console(stderr=True)
        self.progress: Progress | None = None  # the bar under a table that is open

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        if not self.console.is_terminal:
            lines = Lines(self.say, label, total)
            for done, item in enumerate(items, start=1):
                yield item
                lines.step(done)
        elif self.progress is not None:
            yield from _followed(self.progress, items, label, total)
        else:
            with self._bar() as progress:
                yield from _followed(progress, items, label, total)

    def _bar(self, *more: ProgressColumn) -> Progress:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Left(),
            *more,
        )
        return Progress(*columns, console=self.console, transient=True)

    def waiting(self, label: str) -> AbstractContextManager[object]:
        alone = self.console.is_terminal and self.progress is None
        return self.console.status(label) if alone else nullcontext()

    @contextmanager
    def meter(self, label: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """A bar with a note where there is a terminal; elsewhere a line now and then."""
        if self.console.is_terminal:
            with self._bar(TextColumn("{task.fields[note]}")) as progress:
                pace = Pace(total)
                task = progress.add_task(label, total=total, note="", pace=pace)

                def show(done: int, note: str) -> None:
                    pace.step(done)
                    progress.update(task, completed=done, note=note)

                yield _from_the_first(pace.begin, show)
            return
        lines = Lines(self.say, label, total)
        first: list[int] = []

        def tell(done: int, note: str) -> None:
            lines.step(done, note, always=not first or done == total)
            first.append(done)

        yield _from_the_first(lines.begin, tell)

    @contextmanager
    def table(self, columns: Sequence[str]) -> Iterator[Callable[[Sequence[str]], None]]:
        """Live where there is a terminal; elsewhere a line for each row."""
        if not self.console.is_terminal:
            self.say("  ".join(columns))
            yield lambda cells: self.say("  ".join(cells))
            return
        table = Table(*columns)
        self.progress = self._bar()
        try:
            with Live(Group(table, self.progress), console=self.console, refresh_per_second=8):
                yield lambda cells: table.add_row(*cells)
        finally:
            self.progress = None


def _followed(progress: Progress, items: Iterable[T], label: str, total: int | None) -> Iterator[T]:
    pace = Pace(total)
    task = progress.add_task(label, total=total, pace=pace)
    for done, item in enumerate(items, start=1):
        yield item
        pace.step(done)
        progress.update(task, completed=done)
    progress.remove_task(task)


def _from_the_first(begin: Callable[[int], None], step: Callable[[int, str], None]) -> Callable[[int, str], None]:
    """Steps as they are told, of which the first says where this run began."""
    begun = False

    def told(done: int, note: str) -> None:
        nonlocal begun
        if not begun:
            begun = True
            begin(done)
        step(done, note)

    return told


def console(*, stderr: bool) -> Console:
    """Without a voice, and without bars, where this is not the main process."""
    speaks = distributed.is_main()
    terminal = None if speaks else False
    return Console(
        stderr=stderr, highlight=False, markup=False, soft_wrap=True, quiet=not speaks, force_terminal=terminal
    )
