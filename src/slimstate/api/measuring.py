"""Measure models, look into their states, and sweep cuts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from slimstate.evaluation.analyze import Analysis, AnalysisOptions
from slimstate.evaluation.analyze import analyze as analyzed
from slimstate.evaluation.evaluate import EvalOptions
from slimstate.evaluation.evaluate import evaluate as evaluated
from slimstate.evaluation.sweep import SweepOptions
from slimstate.evaluation.sweep import sweep as swept
from slimstate.evaluation.sweep_grid import SweepGrid
from slimstate.models.options import RunOptions
from slimstate.pruning.options import Calibration
from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.sweep import SweepRecord
from slimstate.workflows.inputs import Inputs, Model, Progress


def evaluate(
    model: Model,
    text: str | Path | Iterable[object] | None = None,
    *,
    tokenizer: Any = None,
    tasks: str | None = None,
    recall: bool = False,
    associative: bool = False,
    baseline: Model | None = None,
    options: EvalOptions | None = None,
    run: RunOptions | None = None,
    out: str | Path | None = None,
    progress: Progress = True,
) -> EvaluationRecord:
    """Measure a model: perplexity of a text, tasks of lm-eval, recall; alone or beside a baseline.

    Parameters:
        model: a folder, a hub id, or a model of transformers in memory.
        text: what to predict: a path, a dataset's name, or strings, chats or rows in a list or any iterable.
        tokenizer: that of a model in memory.
        tasks: names of lm-eval with commas between them, or "paper" for the seven of the paper.
        recall: the six recall tasks of the paper.
        associative: random pairs, hidden in `text` and asked for at its end.
        baseline: a second model to put beside this one, such as the uncut one.
        options: how much is measured.
        run: device and precision.
        out: a file for the record, which `report` reads.
        progress: whether to show it; or a `Reporter` of your own.

    Returns:
        A record: `perplexity` (per token), `word_perplexity`, `bits_per_byte`, `lm_eval`, `compared`, ...

    Examples:
        >>> found = slimstate.evaluate("slim", "demo/evaluation.txt", baseline="demo/model")
        >>> found.perplexity, found.baseline.perplexity
    """
    with Inputs(progress, tokenizer, model, baseline) as given:
        first = given.model(model)
        second = None if baseline is None else given.model(baseline)
        return evaluated(
            first, text, tasks=tasks, recall=recall, associative=associative, baseline=second, options=options,
            run=run, out=out, reporter=given.reporter,
        )  # fmt: skip


def sweep(
    model: Model,
    out: str | Path,
    *,
    text: str | Path | Iterable[object],
    calibration: Calibration | str | Path | Iterable[object] | None = None,
    tokenizer: Any = None,
    grid: SweepGrid | None = None,
    options: SweepOptions | None = None,
    run: RunOptions | None = None,
    progress: Progress = True,
) -> SweepRecord:
    """What every method would cost at every key dim, without cutting anything; and a point that is recommended.

    Parameters:
        model: a folder, a hub id, or a model of transformers in memory.
        out: the folder for records, tables and a figure. A sweep that was stopped goes on there.
        text: what to judge cuts by: a path, a dataset's name, or strings, chats or rows in a list or any iterable.
        calibration: what to choose channels by, in the same forms; or a `Calibration`, which says more.
        tokenizer: that of a model in memory.
        grid: methods, compressions or key dims, and scores.
        options: how much is measured, and the loss that a recommended cut may cost.
        run: device and precision.
        progress: whether to show it; or a `Reporter` of your own.

    Returns:
        A record: `rows`, `uncut`, `recommended`; `to_dataframe()` has a row for every cut.

    Examples:
        >>> found = slimstate.sweep("demo/model", "records", text="demo/evaluation.txt",
        ...                         calibration="demo/calibration.txt",
        ...                         grid=slimstate.SweepGrid(methods=("drrqr", "l1"), key_dims=(64, 32)))
        >>> found.to_dataframe().plot.scatter("key_dim", "perplexity")
    """
    with Inputs(progress, tokenizer, model) as given:
        return swept(
            given.model(model), out, text=text, calibration=calibration, grid=grid, options=options, run=run,
            reporter=given.reporter,
        )  # fmt: skip


def analyze(
    models: Model | Sequence[Model],
    text: str | Path | Iterable[object],
    out: str | Path,
    *,
    tokenizer: Any = None,
    options: AnalysisOptions | None = None,
    run: RunOptions | None = None,
    progress: Progress = True,
) -> Analysis:
    """Follow the states of models through a text: how much of them is used, their spectra, their filters.

    Parameters:
        models: one or several folders, hub ids or models in memory, which read the same tokens.
        text: what they read: a path, a dataset's name, or strings, chats or rows in a list or any iterable.
        out: the folder for records and figures.
        tokenizer: that of the models in memory.
        options: how much is read, and how often the states are looked at.
        run: device and precision.
        progress: whether to show it; or a `Reporter` of your own.

    Returns:
        `models`, each with its `utilisation` and `effective_rank`, `figures` and the folder, `path`.

    Examples:
        >>> found = slimstate.analyze(["demo/model", "slim"], "demo/evaluation.txt", "records")
        >>> [model.utilisation for model in found.models]
    """
    several = [models] if isinstance(models, (str, PathLike, torch.nn.Module)) else list(models)
    with Inputs(progress, tokenizer, *several) as given:
        places = [given.model(model) for model in several]
        return analyzed(places, text, out, options=options, run=run, reporter=given.reporter)
