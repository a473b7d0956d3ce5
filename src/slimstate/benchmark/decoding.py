"""One more token for each of B sequences: where the state hurts most, because all of it is read and written.

A step moves at least the weights once and every state twice. With the copy bandwidth of the device, measured in the
same run, this gives the time that no implementation can beat: the roofline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstate.benchmark.bench import Bench, BenchOptions, with_ratios
from slimstate.benchmark.compilation import compile_ahead
from slimstate.benchmark.models import widths_of
from slimstate.benchmark.random_models import library_of, model_for
from slimstate.benchmark.timing import copy_bandwidth, timed_as_graph
from slimstate.models.options import RunOptions
from slimstate.records.benchmark import DecodeRecord, DecodeRow, DecodeSettings, LargestBatch
from slimstate.system.errors import PlanError
from slimstate.system.progress import SILENT, Reporter

BATCHES = (1, 4, 16, 64, 256, 1024, 4096)
COMPILED_BATCHES = (1, 64)  # kernels of few sequences and of many
SPARE = 0.97  # of a GPU's memory, left to its own needs
USUAL = BenchOptions(rounds=20)


def bench_decode(
    models: Sequence[str] = ("delta_net-1.3b",),
    key_dims: Sequence[int] | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    options: BenchOptions = USUAL,
    run: RunOptions | None = None,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> DecodeRecord:
    """Time a decoding step of models at key dims and batch sizes, and find the largest batch that fits."""
    asked = DecodeSettings(
        models=tuple(models), key_dims=tuple(key_dims) if key_dims else None, batches=tuple(sorted(batches))
    )
    if library_of(asked.models) != "fla":
        raise PlanError(
            "decoding is timed for models of flash-linear-attention only; transformers keeps its own caches"
        )
    return time_decoding(asked, Bench.begin("decode", options, run, out=out, reporter=reporter))


def time_decoding(settings: DecodeSettings, bench: Bench) -> DecodeRecord:
    wanted = widths_of(settings)
    fewer = replace(settings, batches=COMPILED_BATCHES)
    compile_ahead(bench, [replace(fewer, models=(model,), key_dims=(key_dim,)) for model, key_dim in wanted])
    bandwidth = copy_bandwidth(bench.device)
    rows: list[DecodeRow] = []
    largest = []
    for name, key_dim in wanted:
        model = model_for(name, key_dim, bench.device, bench.dtype)
        sized = [
            bench.attempt(
                DecodeRow(model=name, key_dim=key_dim, batch=batch), partial(_measure, bench, model, bandwidth)
            )
            for batch in reversed(settings.batches)  # some kernels are tuned once for all, and should be for the most
        ]
        rows += reversed(sized)
        fits = _largest_batch(bench, model)
        largest.append(LargestBatch(model=name, key_dim=key_dim, batch=fits))
        if fits is not None:
            bench.reporter.say(f"model {name}, key dim {key_dim}: {fits:,} sequences fit")
        del model
    return bench.finish(
        DecodeRecord, settings, with_ratios(rows), copy_bandwidth=bandwidth, largest_batch=tuple(largest)
    )


def _measure(bench: Bench, model: Any, bandwidth: float, row: DecodeRow) -> DecodeRow:
    batch = row.batch
    ids = torch.randint(model.config.vocab_size, (batch, 1), device=bench.device)
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values

        def step() -> None:
            model(input_ids=ids, past_key_values=cache, use_cache=True)

        timing = timed_as_graph(step, bench.device, rounds=bench.options.rounds, say=bench.reporter.say)
    row = timing.fill(row)
    state = _bytes(layer.get("recurrent_state") for layer in _layers(cache)) // batch
    other = _bytes(layer.get("conv_state") for layer in _layers(cache)) // batch
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    moved = 2 * state * batch / row.time
    return replace(
        row,
        tokens_per_second=batch / row.time,
        state_bytes=state,
        convolution_bytes=other,
        state_bandwidth=moved,
        share_of_copy_bandwidth=moved / bandwidth,
        roofline_seconds=(weights + 2 * (state + other) * batch) / bandwidth,
    )


def _layers(cache: Any) -> list[Mapping[str, object]]:
    return [cache[layer] for layer in range(len(cache))]


def _bytes(entries: Iterable[object]) -> int:
    """Of tensors, and of tuples of them."""
    total = 0
    for entry in entries:
        parts = entry if isinstance(entry, (tuple, list)) else [entry]
        total += sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))
    return total


def _largest_batch(bench: Bench, model: Any) -> int | None:
    """The most sequences whose step fits into the GPU, by trying: what the memory of two batches promises, or less."""
    if bench.device.type != "cuda":
        return None
    used = {}
    for batch in (64, 128):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
        if not _fits(model, batch, bench.device):
            return None
        used[batch] = torch.cuda.max_memory_allocated(bench.device)
    each = (used[128] - used[64]) / 64
    total = torch.cuda.mem_get_info(bench.device)[1]
    batch = int((SPARE * total - (used[64] - 64 * each)) / each)
    while batch > 128 and not _fits(model, batch, bench.device):
        batch = int(0.97 * batch)
    return batch


def _fits(model: Any, batch: int, device: torch.device) -> bool:
    """Whether two steps of so many sequences can be made."""
    try:
        with torch.inference_mode():
            ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
            cache = model(input_ids=ids, use_cache=True).past_key_values
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()
    return True
