"""Time one more token for each of B sequences, where the state costs most: all of it is read and written.

A step moves at least the weights once and every state twice. With the copy bandwidth of the device, measured in the
same run, this gives a time that no implementation can beat: the roofline.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimstate.benchmark.bench import Bench, compile_ahead, with_ratios
from slimstate.benchmark.options import DecodeBenchConfig
from slimstate.benchmark.random_models import model_for, models_at_dims, row_fields
from slimstate.benchmark.timing import copy_bandwidth
from slimstate.records.benchmark import DecodeRecord, DecodeRow, LargestBatch

COMPILE_BATCHES = (1, 64)  # few and many sequences have kernels of their own
USABLE_MEMORY = 0.97  # share of a GPU's memory that a batch may fill


def time_decoding(options: DecodeBenchConfig, bench: Bench) -> DecodeRecord:
    """Time a decoding step of models at key and value dims and batch sizes, and find the largest batch that fits."""
    cases = models_at_dims(options)
    compile_ahead(bench, replace(options, batches=COMPILE_BATCHES), cases)
    bandwidth = copy_bandwidth(bench.device)
    rows: list[DecodeRow] = []
    largest = []
    for name, dims in cases:
        model = model_for(name, dims, bench.device, bench.dtype)
        fields = row_fields(name, dims)
        by_batch = {
            batch: bench.attempt(DecodeRow(**fields, batch=batch), partial(_measure, bench, model, bandwidth))
            for batch in sorted(options.batches, reverse=True)  # kernels tuned once should be tuned for the largest
        }
        rows += [by_batch[batch] for batch in sorted(by_batch)]
        largest.append(LargestBatch(**fields, batch=_largest_batch(bench, model)))
        if largest[-1].batch is not None:
            bench.reporter.say(largest[-1].line)
        del model
    facts = {"copy_bandwidth": bandwidth, "largest_batch": tuple(largest)}
    return bench.finish(DecodeRecord, options.settings, with_ratios(rows), **facts)


def _measure(bench: Bench, model: Any, bandwidth: float, row: DecodeRow) -> DecodeRow:
    ids = torch.randint(model.config.get_text_config().vocab_size, (row.batch, 1), device=bench.device)
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        row = bench.time_as_graph(row, lambda: model(input_ids=ids, past_key_values=cache, use_cache=True))
    layers = [cache[layer] for layer in range(len(cache))]
    states = _bytes(layer.get("recurrent_state") for layer in layers)
    convolutions = _bytes(layer.get("conv_state") for layer in layers)
    weights = sum(weight.nbytes for weight in model.parameters())
    state_bandwidth = 2 * states / row.time
    return replace(
        row,
        tokens_per_second=row.batch / row.time,
        state_bytes=states // row.batch,
        convolution_bytes=convolutions // row.batch,
        state_bandwidth=state_bandwidth,
        share_of_copy_bandwidth=state_bandwidth / bandwidth,
        roofline_seconds=(weights + 2 * (states + convolutions)) / bandwidth,
    )


def _bytes(entries: Iterable[object]) -> int:
    """Return the size of tensors and of tuples of tensors."""
    parts = (entry if isinstance(entry, (tuple, list)) else [entry] for entry in entries)
    return sum(part.nbytes for group in parts for part in group if isinstance(part, Tensor))


def _largest_batch(bench: Bench, model: Any) -> int | None:
    """Return the largest batch that fits on the GPU: extrapolate from two batches, then try and reduce."""
    if bench.device.type != "cuda":
        return None
    peaks = {}
    for batch in (64, 128):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
        if not _fits(model, batch, bench.device):
            return None
        peaks[batch] = torch.cuda.max_memory_allocated(bench.device)
    per_sequence = (peaks[128] - peaks[64]) / 64
    total = torch.cuda.mem_get_info(bench.device)[1]
    batch = int((USABLE_MEMORY * total - (peaks[64] - 64 * per_sequence)) / per_sequence)
    while batch > 128 and not _fits(model, batch, bench.device):
        batch = int(0.97 * batch)
    return batch


def _fits(model: Any, batch: int, device: torch.device) -> bool:
    """Return whether two steps with this batch fit in memory."""
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
