"""Folders in which long work is kept until it is finished, each for one process at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slimstate.system import leftovers
from slimstate.system.atomic import check_place, made, remove_empty, writing
from slimstate.system.locks import held


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


def is_free(folder: Path) -> bool:
    """Whether nothing is in the folder but what a killed process left."""
    return all(map(leftovers.is_partial, folder.iterdir()))
