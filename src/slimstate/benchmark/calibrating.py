"""What choosing channels costs: calibration for each method against a plain forward pass, and the choice itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstate.benchmark.recording import Bench, Row, positive
from slimstate.benchmark.subjects import config_of, library_of, model_for, width_of
from slimstate.benchmark.timing import Timing, timed
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.evidence import Evidence
from slimstate.core.layout import Mixer
from slimstate.data.text import sample_windows
from slimstate.families import family_of
from slimstate.models.devices import TOKENS_AT_ONCE
from slimstate.models.load import Runtime, load_tokenizer
from slimstate.pruning.calibration import calibrate
from slimstate.selectors import Case, Request, Selector, choose, selector_named
from slimstate.system.errors import PlanError
from slimstate.system.progress import SILENT, Reporter

METHODS = ("drrqr", "s-wanda", "grad")


def bench_calibrate(
    model: str = "delta_net-1.3b",
    *,
    methods: Sequence[str] = METHODS,
    key_dim: int | None = None,
    samples: int = 128,
    length: int = 2048,
    data: str | None = None,
    rounds: int = 3,
    device: str | None = None,
    dtype: str | None = None,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Time calibration and selection on a text, or on random tokens; a config gets random weights."""
    bench = Bench.begin(
        "calibrate", device=device, dtype=dtype, rounds=rounds, out=out, reporter=reporter, library=library_of([model])
    )
    positive(samples=samples, length=length)
    selectors = [selector_named(method) for method in methods]
    for selector in selectors:
        if not selector.calibrated:
            raise PlanError(f"{selector.name} looks at no activations: there is no calibration to time")
    config = config_of(model)
    width = width_of(config)
    keep = width // 2 if key_dim is None else key_dim
    positive(key_dim=keep)
    mixers = family_of(config).mixers(config)
    runtime = Runtime(
        model=model_for(model, width, bench.device, bench.dtype), tokenizer=None, device=bench.device,
        dtype=bench.dtype, kernels=bench.kernels,
    )  # fmt: skip
    tokens = _tokens(model, data, samples, length, runtime.model.config.vocab_size)
    settings: dict[str, Any] = {
        "model": model, "methods": list(methods), "key_dim": keep, "samples": samples, "length": length, "data": data,
    }  # fmt: skip
    row = {"method": "forward", "key_dim": keep}
    rows = [bench.attempt(row, _plain, runtime, tokens)]
    for selector in selectors:
        row = {"method": selector.name, "key_dim": keep}
        rows.append(bench.attempt(row, _measure, runtime, mixers, tokens, selector, keep))
    return bench.finish([_against(row, rows[0]) for row in rows], settings)


def _tokens(model: str, data: str | None, samples: int, length: int, vocabulary: int) -> Tensor:
    if data is None:
        return torch.randint(vocabulary, (samples, length), generator=torch.Generator().manual_seed(0))
    if not Path(model).is_dir():
        raise PlanError(f"--data {data} needs a tokenizer to be read by, which the shape {model} has none of")
    tokenizer = load_tokenizer(Checkpoint.open(model).folder)
    return sample_windows(tokenizer, data, samples=samples, length=length).tokens


def forward(runtime: Runtime, tokens: Tensor) -> None:
    """The passes of a calibration, without it."""
    batch = max(1, TOKENS_AT_ONCE[runtime.device.type] // tokens.shape[1])
    with torch.inference_mode():
        for ids in tokens.split(batch):
            runtime.model.base_model(input_ids=ids.to(runtime.device, torch.long), use_cache=False)


def _plain(bench: Bench, runtime: Runtime, tokens: Tensor) -> tuple[Timing, Row]:
    return timed(lambda: forward(runtime, tokens), bench.device, rounds=bench.rounds), {}


def _measure(
    bench: Bench, runtime: Runtime, mixers: Sequence[Mixer], tokens: Tensor, selector: Selector, keep: int
) -> tuple[Timing, Row]:
    found: dict[int, Evidence] = {}

    def gather() -> None:
        found.update(calibrate(runtime, mixers, tokens, selector.needs))

    timing = timed(gather, bench.device, rounds=bench.rounds, warm_up=1)
    return timing, {"selection_seconds": _selection_seconds(bench, runtime, mixers, found, selector, keep)}


def _selection_seconds(
    bench: Bench, runtime: Runtime, mixers: Sequence[Mixer], found: dict[int, Evidence], selector: Selector, keep: int
) -> float:
    """For all heads of all layers, from evidence in host memory to channels there."""
    request = Request(keep=keep, device=bench.device.type)
    cases = [_case(runtime.model, mixer, found.get(mixer.layer), "weight" in selector.needs) for mixer in mixers]
    choose(selector.name, cases[:1], request)
    started = time.perf_counter()
    choose(selector.name, cases, request)
    return time.perf_counter() - started


def _case(model: Any, mixer: Mixer, evidence: Evidence | None, weighed: bool) -> Case:
    weights = [
        mixer.by_channel(slot, model.get_parameter(mixer.running_name_of(slot)).detach()).cpu() if weighed else None
        for slot in (mixer.query, mixer.key)
    ]
    return Case(
        heads=mixer.axis.heads, width=mixer.axis.width, query_weight=weights[0], key_weight=weights[1],
        evidence=evidence,
    )  # fmt: skip


def _against(row: Row, plain: Row) -> Row:
    """Time and memory as a multiple of the plain forward pass."""
    if row["error"] or plain["error"]:
        return {**row, "times_forward": None, "memory_ratio": None}
    memory = row["peak_bytes"] / plain["peak_bytes"] if row["peak_bytes"] else None
    return {**row, "times_forward": row["seconds"] / plain["seconds"], "memory_ratio": memory}
