"""Win back what a cut costs, and train models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slimstate.models.options import RunOptions
from slimstate.records.training import RecoveryRecord, TrainingRecord
from slimstate.training.options import ControlOptions, PretrainOptions, RecoverOptions, TrainerOptions, TrainingText
from slimstate.training.pretrain import train as trained
from slimstate.training.recover import Preview
from slimstate.training.recover import preview as previewed
from slimstate.training.recover import recover as recovered
from slimstate.workflows.inputs import Inputs, Model, Progress, reporter_for


def recover(
    model: Model,
    out: str | Path,
    *,
    data: str | Path | Iterable[object] | TrainingText,
    teacher: Model | None = None,
    tokenizer: Any = None,
    control: bool = False,
    control_out: str | Path | None = None,
    control_teaches: bool = False,
    options: RecoverOptions | None = None,
    trainer: TrainerOptions | None = None,
    run: RunOptions | None = None,
    progress: Progress = True,
) -> RecoveryRecord:
    """Fine-tune a cut model on text, with the uncut one as its teacher.

    Parameters:
        model: what `prune` wrote: its folder, or the model loaded from it.
        out: the folder for the recovered model; it appears when it is whole.
        data: text to train on: a path, a dataset's name, or strings, chats or rows in a list or any iterable; or a
            `TrainingText`, which says more.
        teacher: the uncut model; by default the one that the cut was made from.
        tokenizer: that of models in memory.
        control: give the uncut model the same training too, which tells how much of the gain is recovery.
        control_out: the folder for that; by default beside `out`.
        control_teaches: train that control first, from the text alone, and learn from it in place of the uncut model;
            for text that has more to teach than the uncut model knows.
        options: everything that decides the result; `RecoverOptions.paper()` is the paper's recovery.
        trainer: how it is run: accumulation, checkpoints, `resume`.
        run: device and precision.
        progress: whether to show it; or a `Reporter` of your own.

    Returns:
        A record: `measured.nats` before and after, `measured.closed`, `log` of all losses, `path`.

    Examples:
        >>> quick = slimstate.RecoverOptions(steps=50, batch_size=4, length=512)
        >>> slimstate.recover("slim", "recovered", data="demo/calibration.txt", options=quick)
    """
    with Inputs(progress, tokenizer, model, teacher) as given:
        uncut = None if teacher is None else given.model(teacher)
        beside = ControlOptions.of(control, control_out, control_teaches)
        return recovered(
            given.model(model), out, data=data, teacher=uncut, control=beside, options=options, trainer=trainer,
            run=run, reporter=given.reporter,
        )  # fmt: skip


def preview(
    model: Model,
    *,
    teacher: Model | None = None,
    control: bool = False,
    control_teaches: bool = False,
    options: RecoverOptions | None = None,
    run: RunOptions | None = None,
    progress: Progress = True,
) -> Preview:
    """What `recover` would train, without text and without training anything.

    Parameters:
        model: as for `recover`, and so are `teacher`, `control`, `control_teaches`, `options`, `run` and `progress`.

    Returns:
        The modules with adapters (`targets`), those trained whole, and how many parameters that is.

    Examples:
        >>> print(slimstate.preview("slim"))
    """
    with Inputs(progress, None, model, teacher) as given:
        uncut = None if teacher is None else given.model(teacher, reads_text=False)
        beside = ControlOptions.of(control, None, control_teaches)
        return previewed(
            given.model(model, reads_text=False), teacher=uncut, control=beside, options=options, run=run,
            reporter=given.reporter,
        )  # fmt: skip


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
    progress: Progress = True,
) -> TrainingRecord:
    """Pre-train the model that a config describes, or train a model further.

    Parameters:
        config: a `config.json`, a shape that comes with slimstate such as "delta_net-5m", or a model's folder.
        out: the folder for the trained model; it appears when it is whole.
        data: text to train on: a path, a dataset's name, or strings, chats or rows in a list or any iterable; or a
            `TrainingText`, which says more.
        tokenizer: a folder or a hub id; by default one is learnt from the text.
        shared_filters: "head" or "all": one convolution filter for each head, or one for all.
        options: everything that decides the result.
        trainer: how it is run: accumulation, checkpoints, `resume`.
        run: device and precision.
        progress: whether to show it; or a `Reporter` of your own.

    Returns:
        A record: `measured.nats` before and after, `log` of all losses, `tokens_per_second`, `path`.

    Examples:
        >>> quick = slimstate.PretrainOptions(steps=20, batch_size=4, length=128)
        >>> slimstate.train("delta_net-5m", "tiny", data="demo/calibration.txt", options=quick)
    """
    return trained(
        config, out, data=data, tokenizer=tokenizer, shared_filters=shared_filters, options=options, trainer=trainer,
        run=run, reporter=reporter_for(progress),
    )  # fmt: skip
