"""Folders in which long work is kept until it is finished, each for one process at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slimstate.system import distributed, leftovers
from slimstate.system.atomic import check_place, made, remove_empty, writing
from slimstate.system.errors import ModelError, OutputError, PlanError
from slimstate.system.interruption import STOP
from slimstate.system.json_files import JsonObject, difference, read_json, write_json
from slimstate.system.locks import held
from slimstate.system.progress import Reporter

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


@contextmanager
def kept_only_with(folder: Path, something: Callable[[], bool]) -> Iterator[None]:
    """Without something to go on with, a stop or an error leaves nothing in the folder."""
    with ExitStack() as stack:
        if distributed.is_main():
            stack.enter_context(STOP.unfinished(folder, unless=something))
        try:
            yield
        except BaseException:
            if distributed.is_main() and not something():
                empty(folder)
            raise


def empty(folder: Path) -> None:
    """Remove what is in the folder; it itself stays, for whoever holds it.

    The settings go last: killed on the way, it is still known whose the rest is.
    """
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == SETTINGS, path.is_file())):
        leftovers.discard(path)


def settings_of(folder: Path, always_set: Set[str], what: str) -> JsonObject | None:
    """What unfinished `what` in a folder was begun with, known by what is always set; None where the folder is free.

    Free it is too with what a killed process left. Anything else is in the way.
    """
    path = folder / SETTINGS
    try:
        found = read_json(path) if path.is_file() else {}
    except ModelError:
        found = {}
    if found.keys() >= always_set:
        return found
    if not all(map(leftovers.is_partial, folder.iterdir())):
        raise OutputError(f"{folder} is in the way and is no unfinished {what}: it has no {SETTINGS} of one")
    return None


def go_on_or_begin(
    folder: Path, settings: Mapping[str, object], always_set: Set[str], what: str, force: bool, reporter: Reporter
) -> None:
    """Go on with what lies in a folder where it was begun with the same settings, else begin `what` there.

    What was begun with others is replaced with `force` alone, and what is not ours never.
    """
    ours = json.loads(json.dumps(settings))
    found = settings_of(folder, always_set, what)
    other = None if found is None else difference(found, ours)
    if found is not None and other is None:
        reporter.say(f"going on with {folder}")
        return
    if other is not None and not force:
        raise PlanError(f"{folder} was begun with other settings: {other}; `force` starts anew")
    empty(folder)
    write_json(folder / SETTINGS, ours)
