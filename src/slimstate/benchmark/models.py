"""Whole models: a prefill, a forward pass, and a training step with its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slimstate.benchmark.bench import Bench, BenchOptions, with_ratios
from slimstate.benchmark.compilation import COMPILED_BATCH, compile_ahead
from slimstate.benchmark.random_models import config_of, library_of, model_for, resized, width_of
from slimstate.benchmark.timing import timed, timed_as_graph
from slimstate.models.options import RunOptions
from slimstate.pruning.calibration import next_token_loss
from slimstate.records.benchmark import ModelRecord, ModelRow, ModelSettings, Subjects
from slimstate.system.progress import SILENT, Reporter

USUAL = BenchOptions(rounds=10)


def widths_of(subjects: Subjects) -> list[tuple[str, int]]:
    """Every model at every key dim asked for; by default its own, a half and a quarter of it."""
    wanted = []
    for model in subjects.models:
        config = config_of(model)
        width = width_of(config)
        for key_dim in subjects.key_dims or (width, width // 2, width // 4):
            resized(config, key_dim)  # refuses what cannot be, before anything is timed
            wanted.append((model, key_dim))
    return wanted


def bench_model(
    models: Sequence[str] = ("delta_net-370m",),
    key_dims: Sequence[int] | None = None,
    *,
    batch: int = 8,
    length: int = 2048,
    modes: Sequence[str] = ModelSettings.MODES,
    options: BenchOptions = USUAL,
    run: RunOptions | None = None,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> ModelRecord:
    """Time models, given as folders, config files or names of shipped configs, at key dims."""
    asked = ModelSettings(
        models=tuple(models), key_dims=tuple(key_dims) if key_dims else None, batch=batch, length=length,
        modes=tuple(modes),
    )  # fmt: skip
    library = library_of(asked.models)
    return time_models(asked, Bench.begin("model", options, run, out=out, reporter=reporter, library=library))


def time_models(settings: ModelSettings, bench: Bench) -> ModelRecord:
    wanted = widths_of(settings)
    smaller = replace(settings, batch=min(settings.batch, COMPILED_BATCH))
    compile_ahead(bench, [replace(smaller, models=(model,), key_dims=(key_dim,)) for model, key_dim in wanted])
    rows = [
        bench.attempt(
            ModelRow(model=model, key_dim=key_dim, width=width_of(config_of(model)), mode=mode),
            partial(_measure, bench, settings),
        )
        for mode in settings.modes  # in this order what a mode leaves behind in memory is the same for all its rows
        for model, key_dim in wanted
    ]
    return bench.finish(ModelRecord, settings, with_ratios(rows))


def _measure(bench: Bench, settings: ModelSettings, row: ModelRow) -> ModelRow:
    model = model_for(row.model, row.key_dim, bench.device, bench.dtype)
    ids = torch.randint(model.config.vocab_size, (settings.batch, settings.length), device=bench.device)
    rounds = bench.options.rounds
    if row.mode == "prefill":
        row = timed_as_graph(_prefill(model, ids), bench.device, rounds=rounds, say=bench.reporter.say).fill(row)
    elif row.mode == "forward":
        row = timed(_forward(model, ids), bench.device, rounds=rounds).fill(row)
    else:
        row = timed(_train(model, ids), bench.device, rounds=rounds).fill(row)
    parameters = sum(weight.numel() for weight in model.parameters())
    return replace(row, tokens_per_second=settings.batch * settings.length / row.time, parameters=parameters)


def _prefill(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    """The states after a prompt, and the logits of its last token."""

    def work() -> None:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return work


def _forward(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    """The logits of every token, kernel by kernel."""

    def work() -> None:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=False)

    return work


def _train(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    """Loss, gradient and AdamW, all in the model's own precision."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=ids.is_cuda)

    def work() -> None:
        optimizer.zero_grad(set_to_none=True)
        next_token_loss(model, ids).backward()
        optimizer.step()

    return work
