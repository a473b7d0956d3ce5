"""`slimstate recover`: fine-tune a cut model on text, with the uncut model as its teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slimstate.system.errors import PlanError
from slimstate.system.options import Options, once
from slimstate.training.options import RecoverOptions
from slimstate.workflows.inputs import Inputs, Model, Progress

if TYPE_CHECKING:
    from slimstate.checkpoints.reader import Checkpoint
    from slimstate.records.training import RecoveryRecord
    from slimstate.training.recover import Preview

# (L634) is a line of the paper's source. The convolutions are always trained whole (L634), as in the released code.
PAPER: Mapping[str, object] = {
    "steps": 2000,  # 32k samples (L634) in batches of 16
    "tokens": None,
    "batch_size": 16,  # L634
    "length": 2048,  # L634
    "lr": 1e-4,  # L634
    "min_lr": 1e-5,  # L634
    "warm_up": 0.05,  # L634
    "full": False,
    "mixers": False,
    "lora_rank": 16,  # L634; 32 in the released code
    "lora_alpha": 32,  # L634; 64 in the released code
    "lora_targets": "q_proj,k_proj,v_proj",  # released code
    "unfreeze": "norms,biases",  # released code
    "kd_weight": 1.0,  # ours: the paper distils from the original model (L634) and names no weight
    "temperature": 2.0,  # ours: nor a temperature
}
PRESETS = {"paper": PAPER}
IN_MEMORY = ("data", "eval_text", "teacher")  # options that may be objects in place of names


class ControlOptions(Options):
    """Control"""

    control: bool = False
    """Also train the uncut model in the same way, into OUT-control, to show how much of the gain is recovery and how
    much is more training. If the model is the uncut one, train only that."""
    control_out: Path | None = None
    """Another folder for the control; a control that was trained with the same settings is used again."""
    control_teaches: bool = False
    """Train the control first, from the text alone, and learn from it in place of the uncut model: for text from which
    the uncut model itself can still learn."""

    def check(self) -> None:
        if self.control_out is not None and self.mode is None:
            raise PlanError("`control_out` needs `control` or `control_teaches`")

    @property
    def mode(self) -> str | None:
        """The option that asks for a control, or None."""
        return "control_teaches" if self.control_teaches else "control" if self.control else None


class RecoverConfig(RecoverOptions):
    """How to recover a cut model"""

    preset: Literal["paper"] | None = once(None)
    """paper: the recovery that the paper describes for DeltaNet and Gated DeltaNet; where its text says nothing, what
    its released code does (adapters on q, k and v, norms and biases trained too). Explicit options override the
    preset."""
    comparison: ControlOptions = ControlOptions()

    def check(self) -> None:
        super().check()
        mode, distillation = self.comparison.mode, self.distillation
        if mode is not None and distillation.no_teacher:
            raise PlanError(f"`{mode}` trains the uncut model too: give it with `teacher`")
        if mode == "control_teaches" and not distillation.kd_weight:
            raise PlanError("`control_teaches` needs a `kd_weight` above 0")
        if mode == "control_teaches" and distillation.cache_teacher is not None:
            raise PlanError("`cache_teacher` needs a teacher that exists: train the control first, as `teacher`")
        if self.preset is not None:  # options that differ from their defaults override it
            values = {name: value for name, value in self.to_values().items() if name not in IN_MEMORY}
            config = self.from_values({**values, "preset": self.preset}, replace(self, preset=None))
            for item in fields(self):
                object.__setattr__(self, item.name, getattr(config, item.name))

    @classmethod
    def from_values(cls, values: Mapping[str, object], base: RecoverConfig | None = None) -> RecoverConfig:
        """Return the config with these values, and those of the preset or of `base` for the rest."""
        values = dict(values)
        if (preset := values.pop("preset", None)) is not None:
            if preset not in PRESETS:
                raise PlanError(f"unknown `preset` {preset!r}; there are {', '.join(PRESETS)}")
            base = super().from_values(PRESETS[preset], base)
        if values.get("tokens") is not None:
            values = {"steps": None, **values}
        if values.get("full") or values.get("mixers"):
            values = {"lora": False, "lora_targets": None, "unfreeze": None, **values}
        elif "lora_rank" in values or "lora_alpha" in values:
            values = {"lora": True, **values}
        return super().from_values(values, base)


def recover(
    model: Model, out: str | Path, config: RecoverConfig | None = None, *,
    tokenizer: Any = None, progress: Progress = True, **options: Any,
) -> RecoveryRecord:  # fmt: skip
    """Fine-tune a cut model on text, with the uncut one as its teacher, and write a checkpoint for the stock class.

    Several processes share every batch, and the main one writes.

    Parameters:
        model: Folder of a model that slimstate cut, a hub id, or the model loaded from it.
        out: Folder for the recovered model; it appears only when it is complete.

    Returns:
        A record: `measured.nats` before and after, `measured.closed`, `log` of all losses, `path`.

    Examples:
        >>> quick = slimstate.RecoverConfig(steps=50, batch_size=4, length=512)
        >>> slimstate.recover("slim", "recovered", quick, data="demo/calibration.txt")
    """
    from slimstate.records.provenance import run_config
    from slimstate.serving.model_card import serving_lines
    from slimstate.training.recover import Control, check_recovery
    from slimstate.training.session import RECOVERY_KIND, Job, Session
    from slimstate.training.teacher import Distillation

    config = RecoverConfig.merge(config, options)
    if config.text.data is None:
        raise PlanError("a recovery trains on text: give it with `data`")
    with Inputs(progress, tokenizer, model, config.distillation.teacher) as inputs:
        student, teacher, config = _open(inputs, model, config)
        mode, control_out, out = config.comparison.mode, config.comparison.control_out, Path(out)
        session = Session(
            kind=RECOVERY_KIND, out=out, options=config, notes=serving_lines, reporter=inputs.reporter,
            provenance=run_config("recover", {"model": student.source, "out": out}, config.to_values()),
            distillation=None if teacher is None else Distillation.of(teacher, config.distillation, config.run),
        )  # fmt: skip
        control = None
        if mode is not None and teacher is not None and teacher.fingerprint != student.fingerprint:
            control_out = control_out or out.with_name(f"{out.name}-control")
            control = Control(session=session, uncut=teacher, out=control_out, teaches=mode == "control_teaches")
        check_recovery(session, student, control)
        identity = {
            "model": student.fingerprint,
            "teacher": None if teacher is None else teacher.fingerprint,
            "control": "teaches" if mode == "control_teaches" else mode is not None,
        }
        with session.open(lambda: student, identity, *([] if control is None else [control.accept])) as tokens:
            record = None if control is None else control.run_training(tokens)
            session = session if control is None else control.next_session()
            return session.run_training(Job(student=student, out=out), tokens, record)


def preview(model: Model, config: RecoverConfig | None = None, *, progress: Progress = True, **options: Any) -> Preview:
    """Describe what `recover` would train, without text and without training anything.

    Parameters:
        model: As for `recover`.

    Returns:
        The modules with adapters (`targets`), those trained whole, and how many parameters that is.

    Examples:
        >>> print(slimstate.preview("slim"))
    """
    from slimstate.training.recover import describe_recovery

    config = RecoverConfig.merge(config, options)
    with Inputs(progress, None, model, config.distillation.teacher) as inputs:
        student, teacher, config = _open(inputs, model, config, reads_text=False)
        if (mode := config.comparison.mode) is not None:
            how = "in the same way" if mode == "control" else "first, on the text alone, and then teach"
            inputs.reporter.say(f"control: the uncut model would also be trained {how}")
        return describe_recovery(student, teacher, config)


def _open(
    inputs: Inputs, model: Model, config: RecoverConfig, *, reads_text: bool = True
) -> tuple[Checkpoint, Checkpoint | None, RecoverConfig]:
    """Return the cut model, its teacher, and the config with what depends on the model."""
    from slimstate.checkpoints.reader import Checkpoint
    from slimstate.system import distributed
    from slimstate.training.adaptation import resolve
    from slimstate.training.teacher import find_teacher

    if config.distillation.teacher is not None:
        teacher = inputs.model(config.distillation.teacher, reads_text=reads_text)
        config = replace(config, distillation=replace(config.distillation, teacher=teacher))
    source = inputs.model(model, reads_text=reads_text)
    distributed.join(config.run.place)
    student = Checkpoint.open(source)
    is_set, config = config.adaptation.is_set, resolve(config, student)
    if config.adaptation.mixers and not is_set:
        inputs.reporter.say("only the mixers are trained: the files store other weights in another form")
    if config.distillation.no_teacher:
        return student, None, config
    uncut, mode = find_teacher(student, config.distillation.teacher, inputs.reporter), config.comparison.mode
    if uncut.fingerprint == student.fingerprint and mode == "control_teaches":
        raise PlanError(f"`control_teaches` needs a cut model, and {student.source} is the uncut one")
    if uncut.fingerprint == student.fingerprint and mode is None:
        raise PlanError(f"the teacher {uncut.source} is the model itself: give the uncut one, or `control` to train it")
    return student, uncut, config
