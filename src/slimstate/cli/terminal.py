"""What every verb shares: its common options, and how it prints.

Results go to standard output; everything else goes to standard error. Of several processes the main one speaks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from slimstate.system import distributed
from slimstate.system.console import console
from slimstate.system.errors import PlanError
from slimstate.system.progress import Reporter

T = TypeVar("T")
# typer carries its own copy of click in some versions, so the class is taken from where typer raises it
USAGE_ERROR: Any = typer.BadParameter.__base__
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
PushToHub = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Upload the result to this repository of the hub, made private where there is none."
    ),
]
CalibrationSamples = Annotated[
    int | None, typer.Option(help="Calibration windows; by default 128, or as many as the text has.")
]
CalibrationLength = Annotated[
    int | None,
    typer.Option(help="Tokens per calibration window; by default 2048, or fewer where the text is shorter."),
]
Text = "Text to {}: .txt, .jsonl, .parquet, .xz or .gz of one, a folder of them, or a datasets name."


def listed(text: str, name: str, convert: Callable[[str], T]) -> list[T]:
    """The members of a comma list."""
    try:
        return [convert(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise PlanError(f"{name} {text}: give numbers with commas between them") from error


@contextmanager
def pushed_to(name: str | None, reporter: Reporter) -> Iterator[Callable[[str | None], None]]:
    """Seen to be possible before the work in its body, which calls what this gives with the folder it wrote."""
    from slimstate.system import hub

    if name is not None:
        distributed.from_main(lambda: hub.check_repository(name))

    def push(folder: str | None) -> None:
        if name is not None and folder is not None:
            with reporter.waiting(f"uploading to {name}"):
                address = distributed.from_main(lambda: hub.push(Path(folder), name))
            reporter.say(f"uploaded to {address}")

    yield push


def print_json(record: Mapping[str, object]) -> None:
    if distributed.is_main():
        print(json.dumps(record, indent=2))


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.2f} MiB"


def printer() -> Console:
    """Standard output, with lines left as long as they are."""
    return console(stderr=False)
