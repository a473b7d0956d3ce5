"""Time the choice of channels: calibration for each method against a plain forward pass, and the selection itself."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from slimstate.benchmark.bench import Bench
from slimstate.benchmark.options import CalibrateBenchConfig
from slimstate.benchmark.random_models import config_of, model_for, resized, width_of
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.evidence import Evidence
from slimstate.core.layout import Mixer, Slot
from slimstate.data.text import sample_windows
from slimstate.families import family_of
from slimstate.models.devices import TOKENS_AT_ONCE
from slimstate.models.load import Runtime, load_tokenizer
from slimstate.pruning.calibration import calibrate
from slimstate.pruning.planning import cases
from slimstate.records.benchmark import CalibrationRecord, CalibrationRow
from slimstate.selectors import Request, Selector, choose, selector_named
from slimstate.system.errors import PlanError


def time_calibration(options: CalibrateBenchConfig, bench: Bench) -> CalibrationRecord:
    """Time calibration and selection on a text, or on random tokens; a config gets random weights."""
    selectors = [selector_named(method) for method in options.methods]
    for selector in selectors:
        if not selector.calibrated:
            raise PlanError(f"{selector.name} needs no calibration, so there is nothing to time; leave it out")
    config = config_of(options.model)
    key_dim = width_of(config) // 2 if options.key_dim is None else options.key_dim
    resized(config, key_dim)  # raises where the model has no such key dim
    model = model_for(options.model, width_of(config), bench.device, bench.dtype)
    runtime = Runtime(model=model, tokenizer=None, device=bench.device, dtype=bench.dtype, kernels=bench.kernels)
    tokens = read_tokens(options, model.config.get_text_config().vocab_size)
    measure = partial(_measure, bench, runtime, family_of(config).mixers(config), tokens)
    forward, *rows = (
        bench.attempt(
            CalibrationRow(method=selector.name if selector else "forward", key_dim=key_dim), partial(measure, selector)
        )
        for selector in (None, *selectors)
    )
    rows = [row if row.error or forward.error else row.against(forward) for row in (forward, *rows)]
    return bench.finish(CalibrationRecord, {**options.settings, "key_dim": key_dim}, rows)


def read_tokens(options: CalibrateBenchConfig, vocabulary: int) -> Tensor:
    """Return windows of the text, or random tokens where there is none."""
    if options.data is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocabulary, (options.samples, options.length), generator=generator)
    if not Path(options.model).is_dir():
        raise PlanError(
            f"`data` {options.data} needs a tokenizer, and the config {options.model} has none; pass a model folder,"
            " or no `data` for random tokens"
        )
    tokenizer = load_tokenizer(Checkpoint.open(options.model).folder)
    text = options.reading(options.data)
    return sample_windows(tokenizer, text, samples=options.samples, length=options.length).tokens


def run_forward(runtime: Runtime, tokens: Tensor) -> None:
    """Run the forward passes of a calibration without collecting anything."""
    batch = max(1, TOKENS_AT_ONCE[runtime.device.type] // tokens.shape[1])
    with torch.inference_mode():
        for ids in tokens.split(batch):
            runtime.model.base_model(input_ids=ids.to(runtime.device, torch.long), use_cache=False)


def _measure(
    bench: Bench, runtime: Runtime, mixers: Sequence[Mixer], tokens: Tensor, selector: Selector | None,
    row: CalibrationRow,
) -> CalibrationRow:  # fmt: skip
    """Time the calibration for a method and the selection, or the forward pass where there is no method."""
    if selector is None:
        return bench.time(row, lambda: run_forward(runtime, tokens))
    evidence: dict[int, Evidence] = {}
    row = bench.time(row, lambda: evidence.update(calibrate(runtime, mixers, tokens, selector.needs)), warm_up=1)

    def read_rows(mixer: Mixer, slot: Slot) -> Tensor:
        weight = runtime.model.get_parameter(mixer.running_name_of(slot)).detach()
        return mixer.by_channel(slot, weight).cpu()

    each = list(cases(read_rows, mixers, selector.needs, evidence))
    request = Request(keep=row.key_dim, device=bench.device.type)
    choose(selector.name, each[:1], request)
    start = time.perf_counter()
    choose(selector.name, each, request)  # for all heads of all layers, from evidence in host memory to channels there
    return replace(row, selection_seconds=time.perf_counter() - start)
