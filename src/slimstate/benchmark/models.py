"""Time whole models: a prefill, a forward pass, and a training step with its optimizer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimstate.benchmark.bench import Bench, with_ratios
from slimstate.benchmark.compilation import COMPILE_BATCH, compile_ahead
from slimstate.benchmark.options import ModelBenchConfig
from slimstate.benchmark.random_models import config_of, model_for, models_at_key_dims, width_of
from slimstate.benchmark.timing import Timing, Work
from slimstate.pruning.calibration import next_token_loss
from slimstate.records.benchmark import ModelRecord, ModelRow


def time_models(options: ModelBenchConfig, bench: Bench) -> ModelRecord:
    """Time models, named by folder, config file or shipped config, at several key dims."""
    cases = models_at_key_dims(options)
    compile_ahead(bench, replace(options, batch=min(options.batch, COMPILE_BATCH)), cases)
    rows = [
        bench.attempt(
            ModelRow(model=model, key_dim=key_dim, width=width_of(config_of(model)), mode=mode),
            partial(_measure, bench, options),
        )
        for mode in options.modes  # outermost, so that all rows of a mode find the same memory in use
        for model, key_dim in cases
    ]
    return bench.finish(ModelRecord, options.settings, with_ratios(rows))


def _measure(bench: Bench, options: ModelBenchConfig, row: ModelRow) -> ModelRow:
    model = model_for(row.model, row.key_dim, bench.device, bench.dtype)
    ids = torch.randint(model.config.vocab_size, (options.batch, options.length), device=bench.device)
    timing = _time(bench, row.mode, model, ids)
    parameters = sum(weight.numel() for weight in model.parameters())
    return replace(timing.fill(row), tokens_per_second=ids.numel() / timing.median, parameters=parameters)


def _time(bench: Bench, mode: str, model: Any, ids: Tensor) -> Timing:
    """Time a prefill (states, and logits of the last token), a forward pass (all logits), or a training step."""
    if mode == "train":
        return bench.time(_train(model, ids))
    with torch.inference_mode():
        if mode == "prefill":
            return bench.time_as_graph(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1))
        return bench.time(lambda: model(input_ids=ids, use_cache=False))


def _train(model: Any, ids: Tensor) -> Work:
    """Compute loss and gradient and update with AdamW, all in the model's own precision."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=ids.is_cuda)

    def work() -> None:
        optimizer.zero_grad(set_to_none=True)
        next_token_loss(model, ids).backward()
        optimizer.step()

    return work
