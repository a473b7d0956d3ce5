"""Pre-train a model on a text, from a config or from where a model stands, and write a plain checkpoint.

A model before its first step is a checkpoint like any other, so this is a recovery without a teacher that trains all
weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slimstate.checkpoints.model_card import training_card
from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.options import RunOptions
from slimstate.records.training import PretrainSettings, TrainingRecord
from slimstate.system import distributed
from slimstate.system.errors import PlanError
from slimstate.system.paths import expand_home
from slimstate.system.progress import SILENT, Reporter
from slimstate.training.initial_model import InitialModel, read_config
from slimstate.training.options import PretrainOptions, TrainerOptions, TrainingText
from slimstate.training.session import Job, Kind, Session

INITIAL = "initial"  # the model before its first step, in the run folder
TRAINED = Kind(
    verb="train",
    input="config",
    label="training",
    settings=PretrainSettings,
    record=lambda outcome, student: TrainingRecord(
        **vars(outcome), parameters=student.parameters, shared_filters=student.mixers[0].sharing
    ),
    card=training_card,
)


def train(
    config: str | Path,
    out: str | Path,
    *,
    data: str | Path | Iterable[object] | TrainingText,
    tokenizer: str | None = None,
    shared_filters: str | None = None,
    options: PretrainOptions | None = None,
    trainer: TrainerOptions | None = None,
    run: RunOptions | None = None,
    reporter: Reporter = SILENT,
) -> TrainingRecord:
    """Train the model that a config describes, or a model further, and write it to `out`. Returns the record.

    Several processes share every batch, and the main one writes; all return when it has.
    """
    options, trainer, run = options or PretrainOptions(), trainer or TrainerOptions(), run or RunOptions()
    distributed.join(run.place)
    start = _start(str(config), tokenizer, shared_filters)
    given = {"tokenizer": tokenizer, "shared_filters": shared_filters}
    session = Session(
        kind=TRAINED,
        model=str(config),
        out=Path(out),
        given=given,
        text=TrainingText.of(data),
        options=options,
        trainer=trainer,
        run=run,
    )
    session.check([start] if isinstance(start, Checkpoint) else [], [session.out])
    begun_with = {"model": start.fingerprint if isinstance(start, Checkpoint) else start.config, **given}
    with session.prepared(lambda: _student(session, start, reporter), begun_with, reporter) as tokens:
        student = start if isinstance(start, Checkpoint) else Checkpoint.open(session.folder / INITIAL)
        reporter.say(f"{config}: {student.parameters:,} parameters")
        return session.train(Job(student=student, out=session.out, source=session.model), tokens, reporter=reporter)


def _start(name: str, tokenizer: str | None, shared_filters: str | None) -> Checkpoint | InitialModel:
    """What the training begins with: a model, or one that is yet to be made."""
    if not expand_home(name).is_dir():
        return InitialModel(config=read_config(name), tokenizer=tokenizer, shared_filters=shared_filters)
    if tokenizer is not None or shared_filters is not None:
        raise PlanError(f"{name} has its tokenizer and its filters: leave out `tokenizer` and `shared_filters`")
    return Checkpoint.open(name)


def _student(session: Session[TrainingRecord], start: Checkpoint | InitialModel, reporter: Reporter) -> Checkpoint:
    """The model to train, made where it is not there yet; refused where it could not be written back."""
    student = start if isinstance(start, Checkpoint) else _made(session, start, reporter)
    session.options.adaptation(student)
    return student


def _made(session: Session[TrainingRecord], start: InitialModel, reporter: Reporter) -> Checkpoint:
    folder = session.folder / INITIAL
    if not folder.is_dir():
        with reporter.waiting("making the initial model"):
            start.write(folder, data=session.text.data, seed=session.options.seed, dtype=session.run.precision_name)
    return Checkpoint.open(folder)
