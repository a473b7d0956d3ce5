"""`slimstate train`: pre-train the model of a config, or a model further: a recovery without a teacher."""

from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.shapes import read_shape
from slimstate.records.provenance import run_config
from slimstate.records.training import TrainingRecord
from slimstate.system import distributed
from slimstate.system.errors import PlanError
from slimstate.system.input_files import expand_home
from slimstate.system.options import as_path
from slimstate.training.adaptation import adaptation_of
from slimstate.training.initial_model import InitialModel
from slimstate.training.session import TRAINING_KIND, Job, Session
from slimstate.workflows.inputs import Progress, reporter_for
from slimstate.workflows.options import TrainConfig

INITIAL = "initial"  # the model before its first step, in the run folder


def train(
    shape: str | Path, out: str | Path, config: TrainConfig | None = None, *, progress: Progress = True, **options: Any
) -> TrainingRecord:
    """Train a model from a config and a text, or a model further, and write a checkpoint for the stock class.

    Several processes share every batch, and the main one writes.

    Parameters:
        shape: A shape that comes with slimstate such as "delta_net-5m", a config.json, or a model folder to train
            further.
        out: Folder for the model; it appears only when it is complete.

    Returns:
        A record: `measured.nats` before and after, `log` of all losses, `tokens_per_second`, `path`.

    Examples:
        >>> quick = slimstate.TrainConfig(steps=20, batch_size=4, length=128)
        >>> slimstate.train("delta_net-5m", "tiny", quick, data="demo/calibration.txt")
    """
    config = TrainConfig.merge(config, options)
    if config.text.data is None:
        raise PlanError("a training needs text: give it with `data`")
    name, out, reporter = str(shape), as_path(out), reporter_for(progress)
    distributed.join(config.run.place)
    start = _start(name, config)
    session = Session(
        kind=TRAINING_KIND, out=out, options=config, reporter=reporter,
        provenance=run_config("train", {"shape": name, "out": out}, config.to_values()),
    )  # fmt: skip
    session.check([start] if isinstance(start, Checkpoint) else [], [out])

    def student() -> Checkpoint:
        checkpoint = start
        if not isinstance(checkpoint, Checkpoint):
            folder, seed, dtype = session.run_folder.path / INITIAL, config.text.seed, config.run.precision_name
            with reporter.waiting("creating the initial model"):
                checkpoint = checkpoint.create(folder, config.text.data, seed=seed, dtype=dtype)
        adaptation_of(config, checkpoint)  # refuses weights that could not be written
        return checkpoint

    identity = {
        "model": start.fingerprint if isinstance(start, Checkpoint) else start.config,
        "tokenizer": config.tokenizer, "shared_filters": config.shared_filters,
    }  # fmt: skip
    with session.open(student, identity) as tokens:
        job = Job(student=student(), out=out, source=name)
        reporter.say(f"{name}: {job.student.parameters:,} parameters")
        return session.run_training(job, tokens)


def _start(name: str, config: TrainConfig) -> Checkpoint | InitialModel:
    """Return the model to train further, or the description of a new one."""
    if not expand_home(name).is_dir():
        return InitialModel(config=read_shape(name), tokenizer=config.tokenizer, shared_filters=config.shared_filters)
    if config.tokenizer is not None or config.shared_filters is not None:
        raise PlanError(f"{name} has its tokenizer and its filters: leave out `tokenizer` and `shared_filters`")
    return Checkpoint.open(name)
