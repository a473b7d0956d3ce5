"""Make the standard streams safe, and print results.

Results go to standard output; everything else goes to standard error. Of several processes only the main one prints.
"""

import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from slimstate.system import distributed
from slimstate.system.errors import OutputError, PlanError

if TYPE_CHECKING:
    from rich.console import Console


class Detail(str):
    """A line that is printed with --verbose only."""


class Table(NamedTuple):
    """A table to print."""

    columns: Sequence[str]
    rows: Iterable[Sequence[str]]


Printout: TypeAlias = Iterable[str | Table]
FILE_WIDTH = 200  # columns of a table where the output is not a terminal


def print_json(record: Mapping[str, object]) -> None:
    if distributed.is_main():
        print(json.dumps(record, indent=2))


def print_all(printout: Printout) -> None:
    """Print lines as they are, and tables; a line for each row where the terminal is too narrow for the table."""
    from rich.table import Table as RichTable

    console = printer()
    for part in printout:
        if isinstance(part, str):
            console.print(part)
            continue
        table, rows = RichTable(*part.columns), list(part.rows)
        table.columns[0].no_wrap = True
        for row in rows:
            table.add_row(*row)
        if not any("…" in segment.text for segment in console.render(table)):  # where a word is cut off
            console.print(table, soft_wrap=False)
            continue
        for row in rows:
            cells = zip(part.columns, row, strict=True)
            console.print("; ".join(f"{name} {cell}".strip() for name, cell in cells if cell))


def printer() -> "Console":
    """Return a console for standard output that does not wrap lines."""
    from slimstate.system.console import console

    output = console(stderr=False)
    if not output.is_terminal:
        output.width = FILE_WIDTH
    return output


class Output(io.TextIOWrapper):
    """Standard output; a failure to write is an OutputError, and a closed pipe is none."""

    def write(self, text: str) -> int:
        with self._checked():
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._checked():
            super().flush()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # the rest of the buffer is written when the process ends, and must not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if not isinstance(error, BrokenPipeError):
                raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def secure_streams() -> None:
    """Open closed standard streams on the null device, so that no file takes their numbers.

    Characters that a stream cannot encode, as in a file name that is not UTF-8, are written with backslashes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115 - to the end of the process
    stream = sys.stdout
    if stream is sys.__stdout__ and type(stream) is io.TextIOWrapper:  # in tests it may be another one
        settings = {"encoding": stream.encoding, "line_buffering": stream.line_buffering}
        settings["write_through"] = stream.write_through
        sys.stdout = sys.__stdout__ = Output(stream.detach(), errors="backslashreplace", **settings)  # type: ignore
    with suppress(AttributeError):
        sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def check_arguments(words: Sequence[str]) -> None:
    """Raise a `PlanError` if a word is not UTF-8, which not every library accepts as a file name."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            text = word.encode("ascii", "backslashreplace").decode()
            raise PlanError(f"{text} is not UTF-8: rename it") from error
