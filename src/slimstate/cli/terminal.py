"""What every verb shares: its common options, and how it speaks to a terminal.

Results go to standard output; everything else goes to standard error. Of several processes the main one speaks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from slimstate.system import distributed
from slimstate.system.errors import PlanError
from slimstate.system.progress import Reporter

T = TypeVar("T")
# typer carries its own copy of click in some versions, so the class is taken from where typer raises it
USAGE_ERROR: Any = typer.BadParameter.__base__
SECONDS_BETWEEN_LINES = 10
Json = Annotated[bool, typer.Option("--json", help="Print one JSON record instead of a table.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU where there is one.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; by default bfloat16 on a GPU, float32 on a CPU.")
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or a hub id.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="For everything that is drawn at random.")]
Documents = Annotated[
    str | None,
    typer.Option(
        help="What is a document, after which an end-of-text token stands: lines, blank (between blank lines), file,"
        " rows. By default a .txt file, or a row of a table; rows that are lines of one text are joined."
    ),
]
Text = "Text to {}: .txt, .jsonl, .parquet, .xz or .gz of one, a folder of them, or a datasets name."


class TerminalReporter(Reporter):
    """Lines and progress bars on standard error; bars only where that is a terminal."""

    def __init__(self) -> None:
        self.console = _console(stderr=True)
        self.progress: Progress | None = None  # the bar under a table that is open

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        if not self.console.is_terminal:
            yield from items
        elif self.progress is not None:
            task = self.progress.add_task(label, total=total)
            yield from self.progress.track(items, task_id=task)
            self.progress.remove_task(task)
        else:
            with self._bar() as progress:
                yield from progress.track(items, total=total, description=label)

    def _bar(self, *more: ProgressColumn) -> Progress:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            *more,
        )
        return Progress(*columns, console=self.console, transient=True)

    def waiting(self, label: str) -> AbstractContextManager[object]:
        alone = self.console.is_terminal and self.progress is None
        return self.console.status(label) if alone else nullcontext()

    @contextmanager
    def meter(self, label: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """A bar with a note where there is a terminal; elsewhere a line now and then."""
        told = began = 0.0
        if self.console.is_terminal:
            with self._bar(TextColumn("{task.fields[note]}")) as progress:
                task = progress.add_task(label, total=total, note="")
                yield lambda done, note: progress.update(task, completed=done, note=note)
            return
        first: int | None = None

        def tell(done: int, note: str) -> None:
            nonlocal told, began, first
            now = time.monotonic()
            if first is None:
                first, began = done, now
            if now - told >= SECONDS_BETWEEN_LINES or done in (first, total):
                told = now
                left = (now - began) * (total - done) / max(1, done - first)
                remaining = f"  {timedelta(seconds=round(left))} left" if first < done < total else ""
                self.say(f"{label} {done}/{total}  {note}{remaining}")

        yield tell

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


def listed(text: str, name: str, convert: Callable[[str], T]) -> list[T]:
    """The members of a comma list."""
    try:
        return [convert(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise PlanError(f"{name} {text}: give numbers with commas between them") from error


def print_json(record: Mapping[str, object]) -> None:
    if distributed.is_main():
        print(json.dumps(record, indent=2))


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.2f} MiB"


def printer() -> Console:
    """Standard output, with lines left as long as they are."""
    return _console(stderr=False)


def _console(*, stderr: bool) -> Console:
    """Without a voice, and without bars, where this is not the main process."""
    speaks = distributed.is_main()
    terminal = None if speaks else False
    return Console(
        stderr=stderr, highlight=False, markup=False, soft_wrap=True, quiet=not speaks, force_terminal=terminal
    )
