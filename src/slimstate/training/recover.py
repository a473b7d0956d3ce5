"""A recovery: its checks before it starts, its control, and a description of what it would train.

The control is the uncut model with the same training, in a folder of its own. It shows how much of the gain is recovery
and how much is more training. A control that teaches learns from the text alone and is then the teacher, in place of
the uncut model.
"""

from dataclasses import replace
from pathlib import Path

from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.stock import stock_model
from slimstate.records.base import Displayable
from slimstate.records.schema import from_json, to_json
from slimstate.records.training import RecoveryRecord, TrainSettings
from slimstate.system import distributed
from slimstate.system.atomic import check_place, overlap
from slimstate.system.errors import OutputError
from slimstate.system.json_files import JsonObject, difference
from slimstate.system.value import Value
from slimstate.training.adaptation import adaptation_of
from slimstate.training.options import RecoverOptions
from slimstate.training.run_checkpoints import CONTROL
from slimstate.training.session import Job, Session
from slimstate.training.tokens import Tokens

TEACHER_SETTINGS = ("kd_weight", "temperature", "top_k")  # without effect where there is no teacher


class Control(Value):
    """The uncut model, and the folder in which it is trained in the same `session`, or was trained before."""

    session: Session[RecoveryRecord]
    uncut: Checkpoint
    out: Path
    teaches: bool

    @property
    def record(self) -> RecoveryRecord | None:
        """The record of a control that was trained before."""
        path = self.out / RecoveryRecord.FILE
        return RecoveryRecord.read(path) if path.is_file() else None

    def check(self) -> None:
        """Check that its folder is apart from those of the recovery, and that an existing one has the same settings."""
        for folder in (self.session.out, self.session.run_folder.path):
            if overlap(self.out, folder):
                raise OutputError(f"the control's folder {self.out} overlaps {folder}: choose another `control_out`")
        if (record := self.record) is not None:
            now = _relevant_settings(self.session.options.settings(), has_teacher=not self.teaches)
            before = _relevant_settings(to_json(record.settings), has_teacher=record.teacher is not None)
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
            problem = f"{self.out} is a control with other settings: {other}"
            raise OutputError(f"{problem}; remove it, or choose another `control_out`")

    def run_training(self, tokens: Tokens) -> RecoveryRecord:
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
        with session.reporter.then("the recovery", self.session.training_tokens):
            return session.run_training(Job(student=self.uncut, out=self.out, part=CONTROL), tokens)

    def next_session(self) -> Session[RecoveryRecord]:
        """Return the session of the recovery, with the trained control as its teacher if it teaches."""
        session = self.session
        if not self.teaches:
            return session
        teacher = Checkpoint.open(self.out)
        distributed.from_main(lambda: session.run_folder.check_teacher(teacher.fingerprint))
        assert session.distillation is not None
        kind = replace(session.kind, facts=lambda student: {"control_teaches": True})
        return replace(session, kind=kind, distillation=replace(session.distillation, teacher=teacher))


def _relevant_settings(settings: JsonObject, *, has_teacher: bool) -> JsonObject:
    """Return the settings that affect a control: those of a distillation only if there is a teacher."""
    if has_teacher and settings["kd_weight"]:
        return {"teacher": True, **settings}
    return {"teacher": False, **{name: value for name, value in settings.items() if name not in TEACHER_SETTINGS}}


def check_recovery(session: Session[RecoveryRecord], student: Checkpoint, control: Control | None) -> None:
    """Check the options, the folders and the teacher cache before anything is read or written."""
    session.options.settings()
    adaptation_of(session.options, student)  # refuses weights that could not be written
    sources, outs, distillation = [student], [session.out], session.distillation
    if control is not None:
        control.check()
        outs += [] if control.record is not None else [control.out]
    sources += [] if distillation is None else [distillation.teacher]
    session.check(sources, outs)
    if distillation is not None and distillation.cache is not None:
        check_place(distillation.cache.folder, folder=True)
        distillation.cache.check()


class Preview(Displayable):
    """What a recovery would train, by the full names of the modules."""

    model: str
    teacher: str | None
    targets: tuple[str, ...]
    convolutions: tuple[str, ...]
    unfrozen: tuple[str, ...]
    trained_parameters: int
    parameters: int
    steps: int
    tokens: int
    settings: TrainSettings
    out: None = None

    def headline(self) -> str:
        return f"{self.model}: {self.trained_parameters:,} of {self.parameters:,} parameters would be trained"


def describe_recovery(student: Checkpoint, teacher: Checkpoint | None, options: RecoverOptions) -> Preview:
    adaptation = adaptation_of(options, student)
    sizes = {name: tensor.shape for name, tensor in stock_model(student.config).state_dict().items()}
    adapted = {f"{name}.weight" for name in adaptation.targets}
    low_rank = sum(adaptation.rank * sum(sizes[name]) for name in adapted)
    whole = sum(sizes[name].numel() for name in adaptation.weights(student.config) if name not in adapted)
    settings = {**options.settings(), "adaptation": to_json(adaptation.describe())}
    return Preview(
        model=student.source,
        teacher=None if teacher is None else teacher.source,
        targets=adaptation.targets,
        convolutions=adaptation.convolutions,
        unfrozen=(*adaptation.norms, *adaptation.biases),
        trained_parameters=student.parameters if adaptation.full else low_rank + whole,
        parameters=student.parameters,
        steps=options.total_steps,
        tokens=options.total_tokens,
        settings=from_json(TrainSettings, settings),
    )
