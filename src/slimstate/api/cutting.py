"""Look at a model and cut it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from slimstate.api.inputs import Inputs, Model
from slimstate.api.progress import Progress
from slimstate.core.plan import Plan
from slimstate.models.options import LoadOptions
from slimstate.pruning.budget import Budget
from slimstate.pruning.estimate import estimate as estimated
from slimstate.pruning.inspect import inspect as inspected
from slimstate.pruning.options import Calibration, CutOptions
from slimstate.pruning.prune import apply_plan as applied
from slimstate.pruning.prune import make_plan as planned
from slimstate.records.cut import CutRecord, EstimateRecord, InspectionRecord
from slimstate.selectors import Method, selector_named
from slimstate.training.distill import prune as pruned

HALF = 0.5  # of the channels, where nobody says how many


def inspect(model: Model, *, budget: Budget | None = None, context: int | None = None) -> InspectionRecord:
    """What the recurrent state of a model costs, and what each key dim would save. Only headers are read.

    Parameters:
        model: a folder, a hub id, a config.json, or a model of transformers in memory.
        budget: memory for the state; the largest key dim that fits is then in `.budget`.
        context: tokens of a sequence, by which KV caches of softmax layers are counted; by default 32,768.

    Returns:
        A record with `key_dim`, `state_bytes`, `options` (the key dims worth choosing) and more.

    Examples:
        >>> found = slimstate.inspect("demo/model")
        >>> print(found)
        >>> found.to_dataframe()
    """
    with Inputs.of(None, False, model) as given:
        return inspected(given.model(model, reads_text=False), budget=budget, context=context)


def prune(
    model: Model,
    out: str | Path | None = None,
    *,
    tokenizer: Any = None,
    key_dim: int | None = None,
    compression: float | None = None,
    budget: Budget | None = None,
    method: Method = "drrqr",
    calibration: Calibration | str | Path | Iterable[object] | None = None,
    options: CutOptions = CutOptions(),
    run: LoadOptions = LoadOptions(),
    progress: Progress = True,
) -> CutRecord:
    """Keep fewer key/query channels in every head, and write a checkpoint that the stock class loads.

    Parameters:
        model: a folder, a hub id, or a model of transformers in memory. One in memory is written to a temporary folder
            first, which takes as much disk as the model, and goes when this is done.
        out: the folder for the cut model; it appears when it is whole. Without it nothing is written: the channels are
            chosen, and of a model in memory the cut one is `.cut_model` of the result.
        tokenizer: that of a model in memory, which reads the text.
        key_dim: channels to keep in every head, exactly.
        compression: the share of channels to remove instead, rounded to a key dim that is a multiple of 16. Half where
            nothing is said.
        budget: memory that the state may take instead: the largest key dim that fits is kept.
        method: "drrqr" (the best), "grad", "s-wanda", "l1", "random" and others, or a `Selector` of your own.
        calibration: text to choose channels by: the path of a .txt, .jsonl or .parquet file or of a folder, a dataset's
            name, a list or any iterable of strings, of chats (lists of messages) or of rows with `text` or `messages`;
            or a `Calibration`, which says more. Not needed for "l1" and "random".
        options: how channels are judged and the cut is made, with reconstruction or without.
        run: device and precision.
        progress: whether to show it; or a `Reporter` of your own.

    Returns:
        A record: `plan` (the kept channels, `plan.selections[layer].keep`), `path`, `state_bytes`, `certificate`, ...

    Examples:
        >>> cut = slimstate.prune("demo/model", "slim", key_dim=64, calibration="demo/calibration.txt")
        >>> cut.plan.selections[0].keep[0]          # channels that head 0 of layer 0 keeps
        >>> AutoModelForCausalLM.from_pretrained(cut.path)

        >>> cut = slimstate.prune(model, tokenizer=tokenizer, compression=0.5, calibration=["Some text.", ...])
        >>> cut.cut_model.generate(...)
    """
    if key_dim is None and compression is None and budget is None:
        compression = HALF
    selector, calibration = selector_named(method), Calibration.of(calibration)
    reads = selector.calibrated and calibration.data is not None
    with Inputs.of(tokenizer, progress, model) as given:
        source = given.model(model, reads_text=reads)
        place = given.folder() / "cut" if out is None and isinstance(model, torch.nn.Module) else out
        record = pruned(
            source, place, key_dim=key_dim, compression=compression, budget=budget, method=selector,
            calibration=calibration, options=options, run=run, reporter=given.reporter,
        )  # fmt: skip
        if out is None and isinstance(model, torch.nn.Module):
            return replace(record, out=None, cut_model=_like(model, Path(str(place))))
        return record


def _like(model: Any, folder: Path) -> Any:
    """The cut model where the uncut one is, and as precise."""
    cut = type(model).from_pretrained(folder, dtype=model.dtype)
    return cut.to(model.device).train(model.training)


def make_plan(
    model: Model,
    *,
    tokenizer: Any = None,
    key_dim: int | None = None,
    compression: float | None = None,
    budget: Budget | None = None,
    method: Method = "drrqr",
    calibration: Calibration | str | Path | Iterable[object] | None = None,
    options: CutOptions = CutOptions(),
    run: LoadOptions = LoadOptions(),
    progress: Progress = True,
) -> Plan:
    """Which channels every head would keep; nothing is written.

    Parameters:
        model: as for `prune`, and so are `tokenizer`, `key_dim`, `compression`, `budget`, `method`, `calibration`,
            `options`, `run` and `progress`.

    Returns:
        The plan: `selections[layer].keep` [heads, key dim], `method`, `summary()`. `to_json()` is the file that
        `apply_plan` reads.

    Examples:
        >>> plan = slimstate.make_plan("demo/model", key_dim=64, calibration="demo/calibration.txt")
        >>> Path("plan.json").write_text(plan.to_json())
        >>> slimstate.apply_plan("demo/model", "plan.json", "slim")
    """
    if key_dim is None and compression is None and budget is None:
        compression = HALF
    calibration = Calibration.of(calibration)
    with Inputs.of(tokenizer, progress, model) as given:
        return planned(
            given.model(model, reads_text=calibration.data is not None), key_dim=key_dim, compression=compression,
            budget=budget, method=method, calibration=calibration, options=options, run=run, reporter=given.reporter,
        )  # fmt: skip


def apply_plan(
    model: Model,
    plan: str | PathLike[str],
    out: str | Path | None = None,
    *,
    force: bool = False,
    progress: Progress = True,
) -> CutRecord:
    """Cut a model by a plan that was made before: no text, no calibration, the same channels.

    Parameters:
        model: the very model that the plan is for: a folder, a hub id, or a model in memory.
        plan: a `slimstate_plan.json`, or the folder of a model that was cut by one.
        out: the folder for the cut model; without it nothing is written.
        force: replace a folder that slimstate wrote, once the new one is whole.
        progress: whether to show it; or a `Reporter` of your own.

    Returns:
        The record of the cut, as `prune` gives it.

    Examples:
        >>> slimstate.apply_plan("demo/model", "slim/slimstate_plan.json", "slim-again")
    """
    with Inputs.of(None, progress, model) as given:
        return applied(given.model(model, reads_text=False), plan, out, force=force, reporter=given.reporter)


def estimate(
    model: Model,
    out: str | Path | None = None,
    *,
    tokenizer: Any = None,
    key_dim: int | None = None,
    compression: float | None = None,
    budget: Budget | None = None,
    method: Method = "drrqr",
    calibration: Calibration | str | Path | Iterable[object] | None = None,
    options: CutOptions = CutOptions(),
    run: LoadOptions = LoadOptions(),
    progress: Progress = True,
) -> EstimateRecord:
    """How long a cut will take and how much memory, within a factor of two; no model is loaded, nothing is written.

    What `prune` refuses before it loads a model is refused here, too.

    Parameters:
        model: as for `prune`, and so are `out`, `tokenizer`, `key_dim`, `compression`, `budget`, `method`,
            `calibration`, `options`, `run` and `progress`.

    Returns:
        A record with `seconds` by stage, `gpu_bytes`, `host_bytes` and `disk_bytes`.

    Examples:
        >>> print(slimstate.estimate("demo/model", key_dim=64, calibration="demo/calibration.txt"))
    """
    if key_dim is None and compression is None and budget is None:
        compression = HALF
    calibration = Calibration.of(calibration)
    with Inputs.of(tokenizer, progress, model) as given:
        return estimated(
            given.model(model, reads_text=calibration.data is not None), out, key_dim=key_dim, compression=compression,
            budget=budget, method=method, calibration=calibration, options=options, run=run, reporter=given.reporter,
        )  # fmt: skip
