"""Progress in a terminal; where the output is not one, a line every few seconds. Only the main process shows it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from functools import partial

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from slimstate.system import distributed
from slimstate.system.progress import Pace, TimedReporter, Update

SECONDS_BETWEEN_LINES = 10


class TerminalReporter(TimedReporter):
    """Show lines and progress bars on standard error; nothing with a negative verbosity, times with a positive one."""

    def __init__(self, verbosity: int = 0, translate: Callable[[str], str] = str) -> None:
        super().__init__()
        self.console = console(stderr=True, quiet=verbosity < 0)
        self.shows_time, self.translate = verbosity > 0, translate
        self.bars: Progress | None = None  # those below an open table

    def say(self, line: str) -> None:
        clock = f"{datetime.now():%H:%M:%S} " if self.shows_time else ""
        self.console.print(clock + self.translate(line), markup=False)

    def detail(self, line: str) -> None:
        if self.shows_time:
            self.say(line)

    def waiting(self, label: str) -> AbstractContextManager[object]:
        return self.console.status(Text(label)) if self.console.is_terminal and self.bars is None else nullcontext()

    @contextmanager
    def shown(self, pace: Pace) -> Iterator[Update]:
        if not self.console.is_terminal:
            yield self._lines(pace)
            return
        with nullcontext(self.bars) if self.bars is not None else self._new_bars() as bars:
            task = bars.add_task(pace.label, total=pace.total, left="", note="")

            def update(done: int, note: str) -> None:
                pace.update(done)
                bars.update(task, completed=done, left=pace.left(), note=note)

            yield update
            bars.remove_task(task)

    def _lines(self, pace: Pace) -> Update:
        """Return an update that shows a line every few seconds, and for the first and the last step with a note."""
        shown, is_first = time.monotonic(), True

        def update(done: int, note: str) -> None:
            nonlocal shown, is_first
            pace.update(done)
            if (note and (is_first or done == pace.total)) or time.monotonic() - shown >= SECONDS_BETWEEN_LINES:
                shown = time.monotonic()
                self.say(pace.line(note))
            is_first = False

        return update

    def _new_bars(self) -> Progress:
        column = partial(TextColumn, markup=False)
        columns = (
            column("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            column("{task.fields[left]}"), column("{task.fields[note]}"),
        )  # fmt: skip
        return Progress(*columns, console=self.console, transient=True)

    @contextmanager
    def table(self, columns: Sequence[str]) -> Iterator[Callable[[Sequence[str]], None]]:
        """Show a live table with the bars below it; outside of a terminal, a line for each row."""
        if not self.console.is_terminal:
            with super().table(columns) as add_row:
                yield add_row
            return
        table = Table(*columns)
        self.bars = self._new_bars()
        try:
            with Live(Group(table, self.bars), console=self.console, refresh_per_second=8, transient=True):
                yield lambda cells: table.add_row(*cells)
        finally:
            self.bars = None


def console(*, stderr: bool, quiet: bool = False) -> Console:
    """Return a console that prints lines as they are, and nothing where this is not the main process."""
    quiet = quiet or not distributed.is_main()
    terminal = False if quiet else None
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True, quiet=quiet, force_terminal=terminal)
