"""Folders in which long work is kept until it is finished, each for one process at a time."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slimstate.system import leftovers
from slimstate.system.atomic import check_place, made, remove_empty, writing
from slimstate.system.errors import ModelError
from slimstate.system.json_files import JsonObject, read_json
from slimstate.system.locks import held

SETTINGS = "settings.json"


@contextmanager
def opened(folder: Path) -> Iterator[None]:
    """The folder, for this process alone, made where it is not there; empty it does not stay."""
    check_place(folder, folder=True)
    with ExitStack() as stack:
        with writing(folder):
            stack.enter_context(made(folder))
            stack.enter_context(held(folder))
            stack.callback(remove_empty, folder)
            leftovers.clear(folder)
        yield


def empty(folder: Path) -> None:
    """Remove what is in the folder; it itself stays, for whoever holds it."""
    for path in folder.iterdir():
        leftovers.discard(path)


def settings_of(folder: Path, always_set: Set[str]) -> JsonObject | None:
    """What the work in a folder was begun with, known by what is always set; None where none has begun there."""
    path = folder / SETTINGS
    try:
        found = read_json(path) if path.is_file() else None
    except ModelError:
        return None
    return found if found is not None and found.keys() >= always_set else None


def is_free(folder: Path) -> bool:
    """Whether nothing is in the folder but what a killed process left."""
    return all(map(leftovers.is_partial, folder.iterdir()))
