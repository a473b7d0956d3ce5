"""What choosing channels costs: calibration for each method against a plain forward pass, and the choice itself."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstate.benchmark.bench import Bench, BenchOptions
from slimstate.benchmark.random_models import check_key_dim, config_of, library_of, model_for, width_of
from slimstate.benchmark.timing import timed
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.evidence import Evidence
from slimstate.core.layout import Mixer
from slimstate.data.documents import Reading
from slimstate.data.rows import Texts
from slimstate.data.text import sample_windows
from slimstate.families import family_of
from slimstate.models.devices import TOKENS_AT_ONCE
from slimstate.models.load import Runtime, load_tokenizer
from slimstate.models.options import RunOptions
from slimstate.pruning.calibration import calibrate
from slimstate.pruning.options import Calibration
from slimstate.records.benchmark import CalibrationRecord, CalibrationRow, CalibrationSettings
from slimstate.selectors import Case, Request, Selector, choose, selector_named
from slimstate.system.errors import PlanError
from slimstate.system.progress import SILENT, Reporter

METHODS = ("drrqr", "s-wanda", "grad")
USUAL = BenchOptions(rounds=3)


def bench_calibrate(
    model: str = "delta_net-1.3b",
    *,
    methods: Sequence[str] = METHODS,
    key_dim: int | None = None,
    calibration: Calibration | str | Path | None = None,
    options: BenchOptions = USUAL,
    run: RunOptions | None = None,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> CalibrationRecord:
    """Time calibration and selection on a text, or on random tokens; a config gets random weights.

    `calibration` is a text, or says more of it; without a text its samples and length are those of random tokens.
    """
    calibration = Calibration.of(calibration)
    if isinstance(calibration.data, Texts):
        raise PlanError("a benchmark names its text, so that it can be repeated: give a file as `calibration`")
    selectors = [selector_named(method) for method in methods]
    for selector in selectors:
        if not selector.calibrated:
            raise PlanError(f"{selector.name} looks at no activations: there is no calibration to time")
    config = config_of(model)
    settings = CalibrationSettings(
        model=model, methods=tuple(methods), samples=calibration.size[0], length=calibration.size[1],
        data=calibration.data, documents=calibration.documents,
        key_dim=width_of(config) // 2 if key_dim is None else check_key_dim(config, key_dim),
    )  # fmt: skip
    bench = Bench.begin("calibrate", options, run, out=out, reporter=reporter, library=library_of([model]))
    work = Work.of(settings, bench)
    keep = settings.key_dim
    plain = bench.attempt(CalibrationRow(method="forward", key_dim=keep), partial(_plain, bench, work))
    rows = [plain] + [
        bench.attempt(CalibrationRow(method=selector.name, key_dim=keep), partial(_measure, bench, work, selector))
        for selector in selectors
    ]
    return bench.finish(
        CalibrationRecord, settings, [row if row.error or plain.error else row.against(plain) for row in rows]
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is calibrated: a model, its mixers, and the tokens."""

    runtime: Runtime
    mixers: Sequence[Mixer]
    tokens: Tensor

    @classmethod
    def of(cls, settings: CalibrationSettings, bench: Bench) -> Work:
        config = config_of(settings.model)
        model = model_for(settings.model, width_of(config), bench.device, bench.dtype)
        runtime = Runtime(
            model=model, tokenizer=None, device=bench.device, dtype=bench.dtype, kernels=bench.kernels
        )  # fmt: skip
        return cls(
            runtime=runtime,
            mixers=family_of(config).mixers(config),
            tokens=_tokens(settings, model.config.vocab_size),
        )


def _tokens(settings: CalibrationSettings, vocabulary: int) -> Tensor:
    if settings.data is None:
        size = settings.samples, settings.length
        return torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(0))
    if not Path(settings.model).is_dir():
        raise PlanError(
            f"`data` {settings.data} needs a tokenizer to be read by, which the shape {settings.model} has none of;"
            " give a model folder, or leave `data` away for random tokens"
        )
    tokenizer = load_tokenizer(Checkpoint.open(settings.model).folder)
    text = Reading(settings.data, settings.documents)
    return sample_windows(tokenizer, text, samples=settings.samples, length=settings.length).tokens


def forward(runtime: Runtime, tokens: Tensor) -> None:
    """The passes of a calibration, without it."""
    batch = max(1, TOKENS_AT_ONCE[runtime.device.type] // tokens.shape[1])
    with torch.inference_mode():
        for ids in tokens.split(batch):
            runtime.model.base_model(input_ids=ids.to(runtime.device, torch.long), use_cache=False)


def _plain(bench: Bench, work: Work, row: CalibrationRow) -> CalibrationRow:
    return timed(lambda: forward(work.runtime, work.tokens), bench.device, rounds=bench.options.rounds).fill(row)


def _measure(bench: Bench, work: Work, selector: Selector, row: CalibrationRow) -> CalibrationRow:
    found: dict[int, Evidence] = {}

    def gather() -> None:
        found.update(calibrate(work.runtime, work.mixers, work.tokens, selector.needs))

    timing = timed(gather, bench.device, rounds=bench.options.rounds, warm_up=1)
    request = Request(keep=row.key_dim, device=bench.device.type)
    return replace(timing.fill(row), selection_seconds=_selection_seconds(work, found, selector, request))


def _selection_seconds(work: Work, found: Mapping[int, Evidence], selector: Selector, request: Request) -> float:
    """For all heads of all layers, from evidence in host memory to channels there."""
    weighed = "weight" in selector.needs
    cases = [_case(work.runtime.model, mixer, found.get(mixer.layer), weighed) for mixer in work.mixers]
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
