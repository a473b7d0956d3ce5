"""Look into one or several models as they read a text: records of their states and filters, and figures of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slimstate.checkpoints.reader import Checkpoint
from slimstate.evaluation.compare import distinct_names, identity, same_tokenizers, shared_windows
from slimstate.evaluation.state_traces import EDGES, Trace, check_times, trace_states
from slimstate.models.devices import pick_device, pick_dtype
from slimstate.models.load import load
from slimstate.records.base import command, versions
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.system.atomic import check_place
from slimstate.system.errors import DataError, PlanError
from slimstate.system.json_files import plain, write_json
from slimstate.system.progress import SILENT, Reporter

READINGS = 4  # times at which the bounds are tested


def analyze(
    models: Sequence[str | Path],
    text: str | Path,
    out: str | Path,
    *,
    length: int = 1024,
    samples: int = 1,
    every: int = 16,
    skip: int = 128,
    seed: int = 0,
    head: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Follow the states of every model through the same tokens; records and figures go to `out`."""
    from slimstate.report.plots import draw_analysis, find_head  # matplotlib is an extra

    started, folder = time.perf_counter(), Path(out)
    pick_dtype(dtype, pick_device(device))
    if samples < 1:
        raise PlanError(f"--samples {samples}: at least 1 is needed")
    if not models:
        raise PlanError("give at least one model")
    check_place(folder, folder=True)
    check_times(length, every, skip)
    checkpoints = [Checkpoint.open(model) for model in models]
    names = distinct_names([checkpoint.source for checkpoint in checkpoints])
    first = checkpoints[0].mixers
    if head is not None:
        find_head([mixer.layer for mixer in first], first[0].value_heads, head)
    windows = shared_windows(same_tokenizers(checkpoints), str(text), length, samples * length)
    if len(windows.tokens) < samples:
        raise DataError(
            f"{text} has {len(windows.tokens)} windows of {length} tokens: use fewer --samples than {samples}"
        )
    options = {
        "text": text, "out": out, "length": length, "samples": samples, "every": every, "skip": skip, "seed": seed,
        "head": head, "device": device, "dtype": dtype,
    }  # fmt: skip
    about = {
        "text": windows.describe(),
        "every": every,
        "skip": skip,
        "seed": seed,
        "versions": versions(),
        "command": command("analyze", models, options),
    }
    traces, filters = [], []
    for name, checkpoint in zip(names, checkpoints, strict=True):
        with reporter.waiting(f"loading {name}"):
            runtime = load(checkpoint.folder, device=device, dtype=dtype)
        reporter.say(f"{name}: kernels: {runtime.kernels}")
        trace = trace_states(
            runtime, checkpoint.mixers, windows.tokens,
            every=every, skip=skip, readings=READINGS, seed=seed, reporter=reporter,
        )  # fmt: skip
        whose = {**identity(checkpoint, name), "kernels": runtime.kernels, **about}
        traces.append({"kind": "trace", **whose, **describe(trace)})
        del runtime
        write_json(folder / f"trace-{name}.json", traces[-1])
        if (plan := checkpoint.plan) is not None:
            write_json(folder / f"plan-{name}.json", {"kind": "plan", "folder": checkpoint.source, **plan})
        if checkpoint.mixers[0].filters:
            filters.append({"kind": "filters", **whose, **read_filters(checkpoint)})
            write_json(folder / f"filters-{name}.json", filters[-1])
    typed = [TraceRecord.from_json(trace) for trace in traces], [FiltersRecord.from_json(entry) for entry in filters]
    drawn = draw_analysis(*typed, folder, head)
    return {
        "out": str(folder),
        "models": [summary(trace) for trace in traces],
        "figures": [str(path) for path in drawn],
        "seconds": time.perf_counter() - started,
    }


def describe(trace: Trace) -> dict[str, Any]:
    """A trace as plain JSON; its curves are means over layers and heads."""
    sampled = {name: plain(values, 6) for name, values in trace.sampled.items() if name != "holds"}
    late = torch.tensor(trace.times) > trace.skip
    return {
        "capacity": trace.capacity,
        "layers": list(trace.layers),
        "heads": trace.utilisation.shape[1],
        "times": list(trace.times),
        "utilisation": plain(trace.utilisation, 5),
        "kappa": plain(trace.kappa, 4),
        "curve": plain(trace.utilisation.mean((0, 1)), 6),
        "effective_rank": plain(trace.utilisation.mean((0, 1)) * trace.capacity, 6),
        "utilisation_by_head": plain(trace.utilisation[..., late].mean(-1), 5),
        "kappa_by_head": plain(trace.kappa[..., late].median(-1).values, 4),
        "histogram": {"low": float(EDGES[0]), "high": float(EDGES[-1]), "counts": trace.histogram.tolist()},
        "spectrum": plain(trace.spectrum, 5),
        "bounds": {
            "states": len(trace.sampled.get("holds", ())),
            "violations": int((trace.sampled["holds"] == 0).sum()) if trace.sampled else 0,
            **sampled,
        },
    }


def read_filters(checkpoint: Checkpoint) -> dict[str, Any]:
    """The convolution filters of the first, the middle and the last mixer, and how alike those of a head are in all."""
    mixers = checkpoint.mixers
    shown = {mixers[0].layer, mixers[len(mixers) // 2].layer, mixers[-1].layer}
    filters: dict[str, dict[str, Any]] = {}
    likeness: dict[str, dict[str, Any]] = {}
    for mixer in mixers:
        for role, axis in mixer.filters:
            slot = axis.slots[0]
            weight = checkpoint.read(mixer.name_of(slot)).float().flatten(1)
            by_head = weight[axis.all_rows(slot)[0]]  # [heads, width, taps]
            if mixer.layer in shown:
                filters.setdefault(str(mixer.layer), {})[role] = plain(by_head, 3)
            likeness.setdefault(role, {})[str(mixer.layer)] = plain(_likeness(by_head), 3)
    return {"filters": filters, "likeness": likeness}


def _likeness(by_head: torch.Tensor) -> torch.Tensor:
    """The mean cosine between two filters of the same head, [heads]."""
    unit = torch.nn.functional.normalize(by_head, dim=-1)
    count = unit.shape[1]
    return (unit.sum(1).square().sum(-1) - count) / max(1, count * (count - 1))


def summary(trace: dict[str, Any]) -> dict[str, Any]:
    by_head = torch.tensor(trace["utilisation_by_head"])
    return {
        "name": trace["name"],
        "key_dim": trace["key_dim"],
        "utilisation": float(by_head.mean()),
        "effective_rank": float(by_head.mean()) * trace["capacity"],
        "states": trace["bounds"]["states"],
        "violations": trace["bounds"]["violations"],
    }
