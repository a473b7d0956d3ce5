"""One more token for each of B sequences: where the state hurts most, because all of it is read and written.

A step moves at least the weights once and every state twice. With the copy bandwidth of the device, measured in the
same run, this gives the time that no implementation can beat: the roofline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstate.benchmark.compiling import compile_ahead
from slimstate.benchmark.modelling import widths_of
from slimstate.benchmark.recording import Bench, Row, positive, with_ratios
from slimstate.benchmark.subjects import library_of, model_for
from slimstate.benchmark.timing import Timing, copy_bandwidth, timed_as_graph
from slimstate.system.errors import PlanError
from slimstate.system.progress import SILENT, Reporter

BATCHES = (1, 4, 16, 64, 256, 1024, 4096)
SPARE = 0.97  # of a GPU's memory, left to its own needs


def bench_decode(
    models: Sequence[str] = ("delta_net-1.3b",),
    key_dims: Sequence[int] | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    rounds: int = 20,
    jobs: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Time a decoding step of models at key dims and batch sizes, and find the largest batch that fits."""
    bench = Bench.begin(
        "decode", device=device, dtype=dtype, rounds=rounds, out=out, reporter=reporter, library=library_of(models)
    )
    positive(batch=min(batches, default=0))
    if library_of(models) != "fla":
        raise PlanError(
            "decoding is timed for models of flash-linear-attention only; transformers keeps its own caches"
        )
    wanted = widths_of(models, key_dims)
    settings: dict[str, Any] = {
        "models": list(models), "key_dims": list(key_dims) if key_dims else None,
        "batches": sorted(batches),
    }  # fmt: skip
    cases = [{**settings, "models": [model], "key_dims": [key_dim], "batches": [1, 64]} for model, key_dim in wanted]
    compile_ahead(bench, cases, jobs)
    bandwidth = copy_bandwidth(bench.device)
    rows: list[Row] = []
    largest = []
    for name, key_dim in wanted:
        model = model_for(name, key_dim, bench.device, bench.dtype)
        sized = []
        for batch in reversed(settings["batches"]):  # some kernels are tuned once for all, and should be for the most
            row = {"model": name, "key_dim": key_dim, "batch": batch}
            sized.append(bench.attempt(row, _measure, model, batch, bandwidth))
        rows += reversed(sized)
        fits = _largest_batch(bench, model)
        largest.append({"model": name, "key_dim": key_dim, "batch": fits})
        if fits is not None:
            reporter.say(f"model {name}, key dim {key_dim}: {fits:,} sequences fit")
        del model
    facts = {"copy_bandwidth": bandwidth, "largest_batch": largest}
    return bench.finish(with_ratios(rows, ("model", "batch")), settings, **facts)


def _measure(bench: Bench, model: Any, batch: int, bandwidth: float) -> tuple[Timing, Row]:
    ids = torch.randint(model.config.vocab_size, (batch, 1), device=bench.device)
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values

        def step() -> None:
            model(input_ids=ids, past_key_values=cache, use_cache=True)

        timing, eager = timed_as_graph(step, bench.device, rounds=bench.rounds, say=bench.reporter.say)
    state = _bytes(layer.get("recurrent_state") for layer in _layers(cache)) // batch
    other = _bytes(layer.get("conv_state") for layer in _layers(cache)) // batch
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    moved = 2 * state * batch / timing.median
    return timing, {
        "tokens_per_second": batch / timing.median,
        **eager,
        "state_bytes": state,
        "convolution_bytes": other,
        "state_bandwidth": moved,
        "share_of_copy_bandwidth": moved / bandwidth,
        "roofline_seconds": (weights + 2 * (state + other) * batch) / bandwidth,
    }


def _layers(cache: Any) -> list[dict[str, Any]]:
    return [cache[layer] for layer in range(len(cache))]


def _bytes(entries: Iterable[Any]) -> int:
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
