"""Time passes: of one linear-attention layer by itself, as the paper does, and of whole models."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from slimstate.benchmark import random_models as models
from slimstate.benchmark.bench import COMPILE_BATCH, Bench, compile_ahead, with_ratios
from slimstate.benchmark.options import MixerBenchConfig, ModelBenchConfig
from slimstate.benchmark.timing import Work
from slimstate.families.contract import Config
from slimstate.pruning.calibration import next_token_loss
from slimstate.records.benchmark import MixerRecord, MixerRow, ModelRecord, ModelRow


def time_mixers(options: MixerBenchConfig, bench: Bench) -> MixerRecord:
    """Time the mixers of model types at several key dims."""
    cases = product(options.models, options.key_dims)
    configs = {(model, dims): models.mixer_config(model, dims, options) for model, dims in cases}
    compile_ahead(bench, replace(options, batch=min(options.batch, COMPILE_BATCH)), configs)
    measure = partial(_measure_mixer, bench, options)
    rows = [
        bench.attempt(MixerRow(model=model, **models.dims_in(config), mode=mode), partial(measure, config))
        for mode in options.modes  # outermost, so that all rows of a mode find the same memory in use
        for (model, _), config in configs.items()
    ]
    return bench.finish(MixerRecord, options.settings, with_ratios(rows))


def _measure_mixer(bench: Bench, options: MixerBenchConfig, config: Config, row: MixerRow) -> MixerRow:
    mixer = models.mixer_of(config, bench.device, bench.dtype)
    hidden = torch.randn(options.batch, options.length, options.hidden, device=bench.device, dtype=bench.dtype)
    if row.mode == "train":
        row = bench.time(row, _train_mixer(mixer, hidden))
    else:
        with torch.inference_mode():
            row = bench.time(row, lambda: mixer(hidden_states=hidden))
    return replace(row, tokens_per_second=options.batch * options.length / row.time)


def _train_mixer(mixer: nn.Module, hidden: Tensor) -> Work:
    """Run forward, and backward to the weights and the input."""
    mixer.train()
    hidden.requires_grad_()

    def work() -> None:
        mixer.zero_grad(set_to_none=True)
        hidden.grad = None
        mixer(hidden_states=hidden)[0].sum().backward()

    return work


def time_models(options: ModelBenchConfig, bench: Bench) -> ModelRecord:
    """Time models, named by folder, config file or shipped config, at several key dims."""
    cases = models.models_at_dims(options)
    compile_ahead(bench, replace(options, batch=min(options.batch, COMPILE_BATCH)), cases)
    rows = [
        bench.attempt(
            ModelRow(**models.row_fields(model, dims), width=models.width_of(models.config_of(model)), mode=mode),
            partial(_measure_model, bench, options, dims),
        )
        for mode in options.modes  # outermost, so that all rows of a mode find the same memory in use
        for model, dims in cases
    ]
    return bench.finish(ModelRecord, options.settings, with_ratios(rows))


def _measure_model(bench: Bench, options: ModelBenchConfig, dims: int | str, row: ModelRow) -> ModelRow:
    """Time a prefill (states, and logits of the last token), a forward pass (all logits), or a training step."""
    model = models.model_for(row.model, dims, bench.device, bench.dtype)
    ids = torch.randint(model.config.get_text_config().vocab_size, (options.batch, options.length), device=bench.device)
    if row.mode == "train":
        row = bench.time(row, _train_model(model, ids))
    else:
        with torch.inference_mode():
            if row.mode == "prefill":
                row = bench.time_as_graph(row, lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1))
            else:
                row = bench.time(row, lambda: model(input_ids=ids, use_cache=False))
    parameters = sum(weight.numel() for weight in model.parameters())
    return replace(row, tokens_per_second=ids.numel() / row.time, parameters=parameters)


def _train_model(model: Any, ids: Tensor) -> Work:
    """Compute loss and gradient and update with AdamW, all in the model's own precision."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=ids.is_cuda)

    def work() -> None:
        optimizer.zero_grad(set_to_none=True)
        next_token_loss(model, ids).backward()
        optimizer.step()

    return work
