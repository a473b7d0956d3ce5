"""Where a training lies that is not finished: a folder beside the one it will become.

It holds what the training was begun with, its tokens, and the checkpoints of what is trained.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slimstate.system.errors import OutputError, PlanError, SlimstateError
from slimstate.system.json_files import difference, read_json, write_json
from slimstate.system.progress import Reporter
from slimstate.training.options import TrainerOptions

SETTINGS = "settings.json"


def run_folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.training")


@contextmanager
def begun(folder: Path, settings: Mapping[str, object], trainer: TrainerOptions, reporter: Reporter) -> Iterator[None]:
    """The folder of this training, new or as an earlier run left it. A new one goes where it cannot be prepared."""
    resumed = _is_resumed(folder, settings, trainer, reporter)
    try:
        yield
    except SlimstateError:
        if not resumed:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _is_resumed(folder: Path, settings: Mapping[str, object], trainer: TrainerOptions, reporter: Reporter) -> bool:
    """Whether the folder is of this training, and is gone on with; otherwise it is made, if nothing is in the way."""
    found = (folder / SETTINGS).is_file()
    if not found and folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise OutputError(f"{folder} is in the way and is no unfinished training: it has no {SETTINGS}")
    if not found or (trainer.force and not trainer.resume):
        if trainer.resume:
            reporter.say(f"nothing to resume in {folder}: starting")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(folder / SETTINGS, settings)
        return False
    if not trainer.resume:
        raise OutputError(f"{folder} holds an unfinished training: `resume` goes on with it, `force` starts anew")
    if (other := difference(read_json(folder / SETTINGS), settings)) is not None:
        raise PlanError(f"{folder} was begun with other settings: {other}")
    return True
