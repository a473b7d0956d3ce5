"""Time one linear-attention layer by itself, as the paper does: forward, and forward with backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from slimstate.benchmark.bench import Bench, with_ratios
from slimstate.benchmark.compilation import COMPILE_BATCH, compile_ahead
from slimstate.benchmark.options import MixerBenchConfig
from slimstate.benchmark.random_models import mixer_config, mixer_of
from slimstate.benchmark.timing import Work
from slimstate.families.contract import Config
from slimstate.records.benchmark import MixerRecord, MixerRow


def time_mixers(options: MixerBenchConfig, bench: Bench) -> MixerRecord:
    """Time the mixers of model types at several key dims."""
    configs = {
        (model, key_dim): mixer_config(model, key_dim, options)
        for model in options.models
        for key_dim in options.key_dims
    }
    compile_ahead(bench, replace(options, batch=min(options.batch, COMPILE_BATCH)), configs)
    rows = [
        bench.attempt(MixerRow(model=model, key_dim=key_dim, mode=mode), partial(_measure, bench, options, config))
        for mode in options.modes  # outermost, so that all rows of a mode find the same memory in use
        for (model, key_dim), config in configs.items()
    ]
    return bench.finish(MixerRecord, options.settings, with_ratios(rows))


def _measure(bench: Bench, options: MixerBenchConfig, config: Config, row: MixerRow) -> MixerRow:
    mixer = mixer_of(config, bench.device, bench.dtype)
    sizes = options.batch, options.length, options.hidden
    hidden = torch.randn(*sizes, device=bench.device, dtype=bench.dtype)
    if row.mode == "train":
        timing = bench.time(_train(mixer, hidden))
    else:
        with torch.inference_mode():
            timing = bench.time(lambda: mixer(hidden_states=hidden))
    return replace(timing.fill(row), tokens_per_second=options.batch * options.length / timing.median)


def _train(mixer: nn.Module, hidden: Tensor) -> Work:
    """Run forward, and backward to the weights and the input."""
    mixer.train()
    hidden.requires_grad_()

    def work() -> None:
        mixer.zero_grad(set_to_none=True)
        hidden.grad = None
        mixer(hidden_states=hidden)[0].sum().backward()

    return work
