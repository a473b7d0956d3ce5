"""Check a recovery before it starts, and describe what it would train."""

from __future__ import annotations

from dataclasses import dataclass

from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.stock import stock_model
from slimstate.records.base import Displayable
from slimstate.records.schema import from_json, to_json
from slimstate.records.training import RecoveryRecord, TrainSettings
from slimstate.system.atomic import check_place
from slimstate.system.errors import PlanError
from slimstate.training.adaptation import adaptation_of
from slimstate.training.control import Control
from slimstate.training.options import RecoverOptions
from slimstate.training.session import Session


def check_recovery(session: Session[RecoveryRecord], student: Checkpoint, control: Control | None) -> None:
    """Check all that can be checked before anything is read or written."""
    session.options.settings()
    if not adaptation_of(session.options, student).has_adapters and session.options.adaptation.keep_adapter:
        raise PlanError("`keep_adapter` needs adapters: give `lora`")
    sources, outs, distillation = [student], [session.out], session.distillation
    if control is not None:
        control.check()
        outs += [] if control.record is not None else [control.out]
    sources += [] if distillation is None else [distillation.teacher]
    session.check(sources, outs)
    if distillation is not None and distillation.cache is not None:
        check_place(distillation.cache.folder, folder=True)
        distillation.cache.check()


@dataclass(frozen=True, kw_only=True)
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
    """Return what a recovery would train."""
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
