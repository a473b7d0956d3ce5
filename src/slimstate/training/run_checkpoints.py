"""The run folder of a training: its settings, its tokens, and the checkpoints of every model that is trained in it."""

from dataclasses import dataclass
from pathlib import Path

from slimstate.system.errors import PlanError
from slimstate.system.json_files import read_json, write_json
from slimstate.system.run_folders import RunFolder

COMPLETE = "slimstate_whole"  # written into a checkpoint after everything else
TEACHER = "teacher.json"
PARTS = CONTROL, MODEL = "control", "model"  # what is trained in a run folder, in this order


@dataclass(frozen=True)
class TrainingFolder(RunFolder):
    """The folder of an unfinished training; once prepared it stays after an error, for its tokens."""

    WORK = "training"
    REQUIRED_SETTINGS = frozenset({"data", "dtype", "length", "lr", "model", "seed", "steps"})

    how_to_continue: str = "`resume` continues it"

    def last_checkpoint(self) -> Path | None:
        """Return the latest checkpoint of the latest part that has one."""
        checkpoints = (last_checkpoint(self.path / part) for part in reversed(PARTS))
        return next((checkpoint for checkpoint in checkpoints if checkpoint is not None), None)

    def has_progress(self) -> bool:
        return self.last_checkpoint() is not None

    def survives_a_stop(self) -> bool:
        return True

    def describe(self) -> str:
        last = self.last_checkpoint()
        return f"{self.path} keeps {'its tokens' if last is None else last.name}; {self.how_to_continue}"

    def check_teacher(self, fingerprint: str) -> None:
        """Store the fingerprint of a teacher that was trained in this run, or raise an error if it is another one."""
        path = self.path / TEACHER
        if not path.is_file():
            write_json(path, {"fingerprint": fingerprint})
        elif read_json(path).get("fingerprint") != fingerprint:
            raise PlanError(f"{self.path} was started with another control as the teacher; `force` starts over")


def last_checkpoint(folder: Path) -> Path | None:
    """Return the latest complete checkpoint of one training."""
    complete = [path.parent for path in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return max(complete, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
