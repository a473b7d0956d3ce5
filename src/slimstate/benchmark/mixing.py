"""One linear-attention layer by itself, the paper's measure of speed: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimstate.benchmark.compiling import compile_ahead
from slimstate.benchmark.recording import Bench, Row, checked_modes, positive, with_ratios
from slimstate.benchmark.subjects import mixer_config, mixer_of
from slimstate.benchmark.timing import Timing, timed
from slimstate.system.progress import SILENT, Reporter

MODES = ("forward", "train")


def bench_mixer(
    models: Sequence[str] = ("delta_net", "gated_deltanet"),
    key_dims: Sequence[int] = (128, 64, 32),
    *,
    batch: int = 32,
    length: int = 2048,
    hidden: int = 2048,
    heads: int = 16,
    value_dim: int = 128,
    modes: Sequence[str] = MODES,
    rounds: int = 20,
    jobs: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Time the mixers of model types at key dims; the defaults are the paper's setting.

    On a GPU, `jobs` processes compile the kernels of all widths first; timing them is then one after the other.
    """
    bench = Bench.begin("mixer", device=device, dtype=dtype, rounds=rounds, out=out, reporter=reporter)
    positive(
        batch=batch, length=length, hidden=hidden, heads=heads, value_dim=value_dim, key_dim=min(key_dims, default=0)
    )
    sizes = {"batch": batch, "length": length, "hidden": hidden, "heads": heads, "value_dim": value_dim}
    settings: dict[str, Any] = {
        "models": list(models),
        "key_dims": list(key_dims),
        **sizes,
        "modes": checked_modes(modes, MODES),
    }
    configs = {
        (model, key_dim): mixer_config(model, hidden=hidden, heads=heads, key_dim=key_dim, value_dim=value_dim)
        for model in models
        for key_dim in key_dims
    }
    cases = [{**settings, "models": [model], "key_dims": [key_dim]} for model, key_dim in configs]
    compile_ahead(bench, cases, jobs)
    rows = []
    for mode in settings["modes"]:  # in this order what a mode leaves behind in memory is the same for all its rows
        for (model, key_dim), config in configs.items():
            row = {"model": model, "key_dim": key_dim, "mode": mode}
            rows.append(bench.attempt(row, _measure, config, batch, length, mode))
    return bench.finish(with_ratios(rows, ("model", "mode")), settings)


def _measure(bench: Bench, config: dict[str, Any], batch: int, length: int, mode: str) -> tuple[Timing, Row]:
    mixer = mixer_of(config, bench.device, bench.dtype)
    given = torch.randn(batch, length, config["hidden_size"], device=bench.device, dtype=bench.dtype)
    work = _forward(mixer, given) if mode == "forward" else _train(mixer, given)
    timing = timed(work, bench.device, rounds=bench.rounds)
    return timing, {"tokens_per_second": batch * length / timing.median}


def _forward(mixer: nn.Module, given: Tensor) -> Callable[[], object]:
    def work() -> None:
        with torch.inference_mode():
            mixer(hidden_states=given)

    return work


def _train(mixer: nn.Module, given: Tensor) -> Callable[[], object]:
    """Forward, and backward to the weights and the input."""
    mixer.train()
    given.requires_grad_()

    def work() -> None:
        mixer.zero_grad(set_to_none=True)
        given.grad = None
        mixer(hidden_states=given)[0].sum().backward()

    return work
