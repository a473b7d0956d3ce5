"""Where a training lies that is not finished: a folder beside the one it will become, for one process at a time.

It holds what the training was begun with, its tokens, and the checkpoints of what is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slimstate.system.errors import OutputError, PlanError
from slimstate.system.json_files import difference, read_json, write_json
from slimstate.system.progress import Reporter
from slimstate.system.run_folders import SETTINGS, empty, kept_only_with, settings_of
from slimstate.training.options import TrainerOptions

WHOLE = "slimstate_whole"  # written into a checkpoint after everything else
TEACHER = "teacher.json"
ALWAYS_SET = {"data", "dtype", "length", "lr", "model", "seed", "steps"}  # by which our settings are known


def run_folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.training")


@contextmanager
def begun(folder: Path, settings: Mapping[str, object], trainer: TrainerOptions, reporter: Reporter) -> Iterator[None]:
    """What is in the folder is of this training. What is new there goes where it cannot be prepared."""
    if _is_resumed(folder, settings, trainer, reporter):
        yield
        return
    with kept_only_with(folder, lambda: False):
        write_json(folder / SETTINGS, settings)
        yield


def keep_teacher(folder: Path, fingerprint: str) -> None:
    """A teacher that was trained on the way is the same one when its student goes on."""
    path = folder / TEACHER
    if not path.is_file():
        write_json(path, {"fingerprint": fingerprint})
    elif read_json(path).get("fingerprint") != fingerprint:
        raise PlanError(f"{folder} was begun with another control as the teacher; `force` starts anew")


def last_whole(folder: Path) -> Path | None:
    """The latest checkpoint of a training that was written to its end."""
    marked = [path.parent for path in folder.glob(f"checkpoint-*/{WHOLE}")]
    return max(marked, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def kept(folder: Path, parts: tuple[str, ...]) -> Path | None:
    """The latest checkpoint in a run folder; `parts` are its trainings, the last of which comes first."""
    return next((found for part in reversed(parts) if (found := last_whole(folder / part)) is not None), None)


def _is_resumed(folder: Path, settings: Mapping[str, object], trainer: TrainerOptions, reporter: Reporter) -> bool:
    """Whether the folder is of this training, and is gone on with; otherwise it is emptied, if it may be."""
    found = settings_of(folder, ALWAYS_SET, "training")
    if found is None or (trainer.force and not trainer.resume):
        if trainer.resume:
            reporter.say(f"nothing to resume in {folder}: starting")
        empty(folder)
        return False
    if not trainer.resume:
        raise OutputError(f"{folder} holds an unfinished training: `resume` goes on with it, `force` starts anew")
    if (other := difference(found, settings)) is not None:
        raise PlanError(f"{folder} was begun with other settings: {other}")
    return True
