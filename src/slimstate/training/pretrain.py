"""A pre-training as a session: from a config, or from a model that is trained further."""

from __future__ import annotations

from slimstate.checkpoints.model_card import training_card
from slimstate.checkpoints.reader import Checkpoint
from slimstate.records.training import TrainingRecord
from slimstate.training.adaptation import adaptation_of
from slimstate.training.initial_model import InitialModel
from slimstate.training.session import Kind, Session

INITIAL = "initial"  # the model before its first step, in the run folder
PRETRAINING = Kind(
    label="training",
    record=lambda outcome, student: TrainingRecord(
        **vars(outcome), parameters=student.parameters, shared_filters=student.mixers[0].sharing
    ),
    card=training_card,
)


def initial_checkpoint(session: Session[TrainingRecord], start: Checkpoint | InitialModel) -> Checkpoint:
    """Return the model to train, written to the run folder where it is new; refuse one that could not be stored."""
    if isinstance(start, InitialModel):
        folder, options = session.run_folder.path / INITIAL, session.options
        if not folder.is_dir():
            with session.reporter.waiting("creating the initial model"):
                start.write(folder, data=options.text.data, seed=options.text.seed, dtype=options.run.precision_name)
        start = Checkpoint.open(folder)
    adaptation_of(session.options, start)
    return start
