"""Whole models: a prefill, and a training step with its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from slimstate.benchmark.compiling import compile_ahead
from slimstate.benchmark.recording import Bench, Row, checked_modes, positive, with_ratios
from slimstate.benchmark.subjects import config_of, library_of, model_for, resized, width_of
from slimstate.benchmark.timing import Timing, timed, timed_as_graph
from slimstate.pruning.calibration import next_token_loss
from slimstate.system.progress import SILENT, Reporter

MODES = ("prefill", "train")


def widths_of(models: Sequence[str], key_dims: Sequence[int] | None) -> list[tuple[str, int]]:
    """Every model at every key dim asked for; by default its own, a half and a quarter of it."""
    wanted = []
    for model in models:
        config = config_of(model)
        width = width_of(config)
        for key_dim in key_dims or [width, width // 2, width // 4]:
            resized(config, key_dim)  # refuses what cannot be, before anything is timed
            wanted.append((model, key_dim))
    return wanted


def bench_model(
    models: Sequence[str] = ("delta_net-370m",),
    key_dims: Sequence[int] | None = None,
    *,
    batch: int = 8,
    length: int = 2048,
    modes: Sequence[str] = MODES,
    rounds: int = 10,
    jobs: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Time models, given as folders, config files or names of shipped configs, at key dims."""
    bench = Bench.begin(
        "model", device=device, dtype=dtype, rounds=rounds, out=out, reporter=reporter, library=library_of(models)
    )
    positive(batch=batch, length=length)
    wanted = widths_of(models, key_dims)
    settings: dict[str, Any] = {
        "models": list(models), "key_dims": list(key_dims) if key_dims else None,
        "batch": batch, "length": length, "modes": checked_modes(modes, MODES),
    }  # fmt: skip
    cases = [{**settings, "models": [model], "key_dims": [key_dim]} for model, key_dim in wanted]
    compile_ahead(bench, cases, jobs)
    rows = []
    for mode in settings["modes"]:  # in this order what a mode leaves behind in memory is the same for all its rows
        for model, key_dim in wanted:
            row = {"model": model, "key_dim": key_dim, "width": width_of(config_of(model)), "mode": mode}
            rows.append(bench.attempt(row, _measure, model, key_dim, batch, length, mode))
    return bench.finish(with_ratios(rows, ("model", "mode")), settings)


def _measure(bench: Bench, name: str, key_dim: int, batch: int, length: int, mode: str) -> tuple[Timing, Row]:
    model = model_for(name, key_dim, bench.device, bench.dtype)
    ids = torch.randint(model.config.vocab_size, (batch, length), device=bench.device)
    eager: Row = {}
    if mode == "prefill":
        work = _prefill(model, ids)
        timing, eager = timed_as_graph(work, bench.device, rounds=bench.rounds, say=bench.reporter.say)
    else:
        timing = timed(_train(model, ids), bench.device, rounds=bench.rounds)
    parameters = sum(weight.numel() for weight in model.parameters())
    return timing, {"tokens_per_second": batch * length / timing.median, "parameters": parameters, **eager}


def _prefill(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    """The states after a prompt, and the logits of its last token."""

    def work() -> None:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

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
