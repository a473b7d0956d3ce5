"""The control of a recovery: the uncut model with the same training, in a folder of its own.

It shows how much of the gain is recovery and how much is more training. A control that teaches learns from the text
alone and is then the teacher, in place of the uncut model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from slimstate.checkpoints.reader import Checkpoint
from slimstate.records.schema import to_json
from slimstate.records.training import RECOVERY, RecoveryRecord
from slimstate.system import distributed
from slimstate.system.atomic import overlap
from slimstate.system.errors import OutputError
from slimstate.system.json_files import JsonObject, difference
from slimstate.training.run_checkpoints import CONTROL
from slimstate.training.session import Job, Session
from slimstate.training.tokens import Tokens

TEACHER_SETTINGS = ("kd_weight", "temperature", "top_k")  # without effect where there is no teacher


@dataclass(frozen=True, kw_only=True)
class Control:
    """The uncut model, and the folder in which it is trained in the same `session`, or was trained before."""

    session: Session[RecoveryRecord]
    uncut: Checkpoint
    out: Path
    teaches: bool

    @property
    def record(self) -> RecoveryRecord | None:
        """The record of a control that was trained before."""
        path = self.out / RECOVERY
        return RecoveryRecord.read(path) if path.is_file() else None

    def check(self) -> None:
        """Check that its folder is apart from those of the recovery, and that an existing one has the same settings."""
        for folder in (self.session.out, self.session.run_folder.path):
            if overlap(self.out, folder):
                raise OutputError(f"the control's folder {self.out} overlaps {folder}: choose another `control_out`")
        if (record := self.record) is not None:
            now = _decisive(self.session.options.settings(), has_teacher=not self.teaches)
            before = _decisive(to_json(record.settings), has_teacher=record.teacher is not None)
            self._compare({**before, "model": record.fingerprint}, {**now, "model": self.uncut.fingerprint})

    def accept(self, tokens: Tokens) -> None:
        """Refuse an existing control of another text."""
        if (record := self.record) is not None:
            digest = None if record.corpus is None else record.corpus.digest
            before = {"tokens": digest, "measured on": f"{record.measured.tokens} tokens of {record.measured.text}"}
            measured_on = f"{tokens.held_out.numel()} tokens of {tokens.measured_on}"
            self._compare(before, {"tokens": tokens.corpus.digest, "measured on": measured_on})

    def _compare(self, before: JsonObject, now: JsonObject) -> None:
        if (other := difference(before, now)) is not None:
            raise OutputError(
                f"{self.out} is a control with other settings: {other}; remove it, or choose another `control_out`"
            )

    def train(self, tokens: Tokens) -> RecoveryRecord:
        """Train the control, unless that was done before, and return its record."""
        say, session = self.session.reporter.say, self.session
        if (record := self.record) is not None:
            say(f"control: {self.out}, trained before with the same settings")
            return record
        if self.teaches:
            say(f"control: the uncut model is trained on the text alone, into {self.out}; then it teaches")
            session = replace(session, distillation=None)
        else:
            say(f"control: the uncut model gets the same training, into {self.out}")
        return session.train(Job(student=self.uncut, out=self.out, part=CONTROL), tokens)

    def next_session(self) -> Session[RecoveryRecord]:
        """Return the session of the recovery, with the trained control as its teacher if it teaches."""
        session = self.session
        if not self.teaches:
            return session
        teacher = Checkpoint.open(self.out)
        distributed.from_main(lambda: session.run_folder.check_teacher(teacher.fingerprint))
        assert session.distillation is not None
        kind = replace(session.kind, record=lambda run, student: RecoveryRecord(**vars(run), control_teaches=True))
        return replace(session, kind=kind, distillation=replace(session.distillation, teacher=teacher))


def _decisive(settings: JsonObject, *, has_teacher: bool) -> JsonObject:
    """Return the settings that decided a control: those of a distillation only where there was one."""
    if has_teacher and settings["kd_weight"]:
        return {"teacher": True, **settings}
    return {"teacher": False, **{name: value for name, value in settings.items() if name not in TEACHER_SETTINGS}}
