"""One linear-attention layer by itself, the paper's measure of speed: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from slimstate.benchmark.bench import Bench, BenchOptions, with_ratios
from slimstate.benchmark.compilation import COMPILED_BATCH, compile_ahead
from slimstate.benchmark.random_models import mixer_config, mixer_of
from slimstate.benchmark.timing import timed
from slimstate.families.contract import Config
from slimstate.models.options import RunOptions
from slimstate.records.benchmark import MixerRecord, MixerRow, MixerSettings, MixerShape
from slimstate.system.progress import SILENT, Reporter

PAPER, PAPER_SHAPE = ("delta_net", "gated_deltanet"), MixerShape()
USUAL = BenchOptions(rounds=20)


def bench_mixer(
    models: Sequence[str] = PAPER,
    key_dims: Sequence[int] = (128, 64, 32),
    *,
    shape: MixerShape = PAPER_SHAPE,
    modes: Sequence[str] = MixerSettings.MODES,
    options: BenchOptions = USUAL,
    run: RunOptions | None = None,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> MixerRecord:
    """Time the mixers of model types at key dims; the default sizes are those the paper names.

    It times 2048 tokens by its text and 4096 by its released code, which also leaves out the output gate.
    """
    asked = MixerSettings(models=tuple(models), key_dims=tuple(key_dims), modes=tuple(modes), **asdict(shape))
    return time_mixers(asked, Bench.begin("mixer", options, run, out=out, reporter=reporter))


def time_mixers(settings: MixerSettings, bench: Bench) -> MixerRecord:
    configs = {
        (model, key_dim): mixer_config(model, key_dim, settings)
        for model in settings.models
        for key_dim in settings.key_dims
    }
    smaller = replace(settings, batch=min(settings.batch, COMPILED_BATCH))
    compile_ahead(bench, [replace(smaller, models=(model,), key_dims=(key_dim,)) for model, key_dim in configs])
    rows = [
        bench.attempt(MixerRow(model=model, key_dim=key_dim, mode=mode), partial(_measure, bench, settings, config))
        for mode in settings.modes  # in this order what a mode leaves behind in memory is the same for all its rows
        for (model, key_dim), config in configs.items()
    ]
    return bench.finish(MixerRecord, settings, with_ratios(rows))


def _measure(bench: Bench, settings: MixerSettings, config: Config, row: MixerRow) -> MixerRow:
    mixer = mixer_of(config, bench.device, bench.dtype)
    sizes = settings.batch, settings.length, settings.hidden
    given = torch.randn(*sizes, device=bench.device, dtype=bench.dtype)
    work = _forward(mixer, given) if row.mode == "forward" else _train(mixer, given)
    timing = timed(work, bench.device, rounds=bench.options.rounds)
    return replace(timing.fill(row), tokens_per_second=settings.batch * settings.length / timing.median)


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
