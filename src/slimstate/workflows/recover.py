"""`slimstate recover`: fine-tune a cut model on text, with the uncut model as its teacher."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.records.provenance import run_config
from slimstate.records.training import RecoveryRecord
from slimstate.serving.engines import serving_lines
from slimstate.system import distributed
from slimstate.system.errors import PlanError
from slimstate.system.options import as_path
from slimstate.system.run_folders import path_beside
from slimstate.training.adaptation import resolve
from slimstate.training.recover import Control, Preview, check_recovery, describe_recovery
from slimstate.training.session import RECOVERY_KIND, Job, Session
from slimstate.training.teacher import Distillation, find_teacher
from slimstate.workflows.inputs import Inputs, Model, Progress
from slimstate.workflows.options import RecoverConfig


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
    config = RecoverConfig.merge(config, options)
    if config.text.data is None:
        raise PlanError("a recovery trains on text: give it with `data`")
    with Inputs(progress, tokenizer, model, config.distillation.teacher) as inputs:
        student, teacher, config = _open(inputs, model, config)
        mode, control_out, out = config.comparison.mode, config.comparison.control_out, as_path(out)
        session = Session(
            kind=RECOVERY_KIND, out=out, options=config, notes=serving_lines, reporter=inputs.reporter,
            provenance=run_config("recover", {"model": student.source, "out": out}, config.to_values()),
            distillation=None if teacher is None else Distillation.of(teacher, config.distillation, config.run),
        )  # fmt: skip
        control = None
        if mode is not None and teacher is not None and teacher.fingerprint != student.fingerprint:
            control_out = control_out or path_beside(out, "-control")
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
    if config.distillation.teacher is not None:
        teacher = inputs.model(config.distillation.teacher, reads_text=reads_text)
        config = replace(config, distillation=replace(config.distillation, teacher=teacher))
    source = inputs.model(model, reads_text=reads_text)
    distributed.join(config.run.place)
    student = Checkpoint.open(source)
    student.check_plain("trained")
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
