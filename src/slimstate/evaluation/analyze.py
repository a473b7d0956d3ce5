"""Look into one or several models as they read a text: records of their states and filters, and figures of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from slimstate.checkpoints.identity import identity
from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.documents import Reading, check_documents
from slimstate.data.rows import Texts, as_text_source
from slimstate.data.text import Windows
from slimstate.evaluation.compare import distinct_names, same_tokenizers, shared_windows, text_of
from slimstate.evaluation.state_traces import EDGES, Trace, check_times, trace_states
from slimstate.models.load import load
from slimstate.models.options import RunOptions
from slimstate.records.base import versions
from slimstate.records.display import Displayable
from slimstate.records.ownership import check_drawn, check_record
from slimstate.records.provenance import run_config
from slimstate.records.states import Bounds, ByHead, FiltersRecord, Histogram, Numbers, TraceRecord
from slimstate.system.atomic import check_kind, check_place, staged_files
from slimstate.system.errors import DataError, PlanError
from slimstate.system.json_files import plain
from slimstate.system.progress import SILENT, Reporter

FIGURES = ("utilisation*", "spectra.*", "spectrum.*", "retrieval-error.*", "filters-*")
READINGS = 4  # times at which the bounds are tested


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions:
    """How the states are followed through a text, and whose spectra are drawn.

    Parameters:
        length: tokens of each text.
        samples: texts to average over.
        every: tokens after which the states are looked at.
        skip: tokens that spectra and maps leave out.
        seed: for what is drawn at random.
        head: LAYER:HEAD whose spectra are drawn; by default a typical one.
        documents: how those of the text are told apart, by default as it suggests: lines, blank, file or rows.

    Examples:
        >>> slimstate.analyze("model", "text.txt", "records", options=slimstate.AnalysisOptions(length=512, head="0:1"))
    """

    length: int = 1024
    samples: int = 1
    every: int = 16
    skip: int = 128
    seed: int = 0
    head: str | None = None
    documents: str | None = None

    def __post_init__(self) -> None:
        check_documents(self.documents)
        if self.samples < 1:
            raise PlanError(f"`samples` {self.samples}: at least 1 is needed")
        check_times(self.length, self.every, self.skip)


@dataclass(frozen=True, kw_only=True)
class StateUse:
    """How much of its states one model uses, and how many of those sampled lay outside a bound of the theory."""

    name: str
    key_dim: int | None
    utilisation: float
    effective_rank: float
    states: int
    violations: int

    @classmethod
    def of(cls, trace: TraceRecord) -> StateUse:
        by_head = torch.tensor(trace.utilisation_by_head)
        return cls(
            name=trace.name,
            key_dim=trace.key_dim,
            utilisation=float(by_head.mean()),
            effective_rank=float(by_head.mean()) * trace.capacity,
            states=trace.bounds.states,
            violations=trace.bounds.violations,
        )


@dataclass(frozen=True, kw_only=True)
class Analysis(Displayable):
    """The folder of the records, the models in short, and the figures."""

    out: str
    models: tuple[StateUse, ...]
    figures: tuple[str, ...]
    seconds: float

    def headline(self) -> str:
        return f"how much of their states {len(self.models)} models use" if len(self.models) > 1 else "state in use"

    def table(self) -> list[dict[str, object]]:
        """One row for every model."""
        return [vars(model) for model in self.models]


def analyze(
    models: Sequence[str | PathLike[str]],
    text: str | Path | Iterable[object],
    out: str | Path,
    *,
    options: AnalysisOptions | None = None,
    run: RunOptions | None = None,
    reporter: Reporter = SILENT,
) -> Analysis:
    """Follow the states of every model through the same tokens; records and figures go to `out`."""
    from slimstate.report.plots import draw_analysis, find_head  # matplotlib is an extra

    started, folder = time.perf_counter(), Path(out)
    options, run = options or AnalysisOptions(), run or RunOptions()
    if not models:
        raise PlanError("give at least one model")
    check_place(folder, folder=True)
    checkpoints = [Checkpoint.open(model) for model in models]
    names = distinct_names([checkpoint.source for checkpoint in checkpoints])
    first = checkpoints[0].mixers
    if options.head is not None:
        find_head([mixer.layer for mixer in first], first[0].value_heads, options.head)
    _check_folder(folder, names)
    read = as_text_source(text)
    windows = _windows(checkpoints, read, options)
    config = run_config("analyze", {"models": models}, {"text": read, "out": out, **vars(options), **vars(run)})
    shared = {
        "text": text_of(windows), "every": options.every, "skip": options.skip, "seed": options.seed,
        "versions": versions(), "config": config,
    }  # fmt: skip
    traces, filters, plans = [], [], {}
    for name, checkpoint in zip(names, checkpoints, strict=True):
        about = {**vars(identity(checkpoint, name)), **shared}
        traces.append(_follow(checkpoint, windows, about, options, run, reporter))
        if (plan := checkpoint.plan) is not None:
            plans[name] = replace(plan, folder=checkpoint.source)
        if checkpoint.mixers[0].filters:
            filters.append(filters_record(checkpoint, {**about, "kernels": traces[-1].kernels}))
    results: tuple[TraceRecord | FiltersRecord, ...] = (*traces, *filters)
    with staged_files(folder) as place:
        for record in results:
            record.write(place / f"{record.KIND}-{record.name}.json")
        for name, plan in plans.items():
            plan.write(place / f"plan-{name}.json")
        drawn = draw_analysis(traces, filters, place, options.head)
    return Analysis(
        out=str(folder),
        models=tuple(map(StateUse.of, traces)),
        figures=tuple(str(folder / path.name) for path in drawn),
        seconds=time.perf_counter() - started,
    )


def _check_folder(folder: Path, names: Sequence[str]) -> None:
    """Nobody else has files there by the names that ours will have."""
    for kind in (TraceRecord.KIND, FiltersRecord.KIND, "plan"):
        for name in names:
            check_kind(folder / f"{kind}-{name}.json", folder=False)
            check_record(folder / f"{kind}-{name}.json")
    check_drawn(folder, FIGURES, beside=f"{TraceRecord.KIND}-*.json")


def _windows(checkpoints: Sequence[Checkpoint], text: str | Texts, options: AnalysisOptions) -> Windows:
    length, samples = options.length, options.samples
    windows = shared_windows(same_tokenizers(checkpoints), Reading(text, options.documents), length, samples * length)
    if len(windows.tokens) < samples:
        raise DataError(
            f"{text} has {len(windows.tokens)} windows of {length} tokens: use fewer `samples` than {samples}"
        )
    return windows


def _follow(
    checkpoint: Checkpoint,
    windows: Windows,
    about: Mapping[str, Any],
    options: AnalysisOptions,
    run: RunOptions,
    reporter: Reporter,
) -> TraceRecord:
    """The states of one model, which is in memory no longer than that."""
    with reporter.waiting(f"loading {about['name']}"):
        runtime = load(checkpoint.folder, device=run.device, dtype=run.dtype)
    reporter.say(f"{about['name']}: kernels: {runtime.kernels}")
    trace = trace_states(
        runtime, checkpoint.mixers, windows.tokens,
        every=options.every, skip=options.skip, readings=READINGS, seed=options.seed, reporter=reporter,
    )  # fmt: skip
    return trace_record(trace, {**about, "kernels": runtime.kernels})


def trace_record(trace: Trace, about: Mapping[str, Any]) -> TraceRecord:
    """A trace as numbers; its curves are means over layers and heads. `about` has the fields of which model and how."""
    late = torch.tensor(trace.times) > trace.skip
    mean = trace.utilisation.mean((0, 1))
    sampled = {name: rounded(values, 6) for name, values in trace.sampled.items() if name != "holds"}
    return TraceRecord(
        **about,
        capacity=trace.capacity,
        layers=trace.layers,
        heads=trace.utilisation.shape[1],
        times=trace.times,
        utilisation=rounded(trace.utilisation, 5),
        kappa=rounded(trace.kappa, 4),
        curve=rounded(mean, 6),
        effective_rank=rounded(mean * trace.capacity, 6),
        utilisation_by_head=rounded(trace.utilisation[..., late].mean(-1), 5),
        kappa_by_head=rounded(trace.kappa[..., late].median(-1).values, 4),
        histogram=Histogram(low=float(EDGES[0]), high=float(EDGES[-1]), counts=rounded(trace.histogram)),
        spectrum=rounded(trace.spectrum, 5),
        bounds=Bounds(
            states=len(trace.sampled.get("holds", ())),
            violations=int((trace.sampled["holds"] == 0).sum()) if trace.sampled else 0,
            **sampled,
        ),
    )


def filters_record(checkpoint: Checkpoint, about: Mapping[str, Any]) -> FiltersRecord:
    """The convolution filters of the first, the middle and the last mixer, and how alike those of a head are in all."""
    mixers = checkpoint.mixers
    shown = {mixers[0].layer, mixers[len(mixers) // 2].layer, mixers[-1].layer}
    filters: dict[str, dict[str, tuple[ByHead, ...]]] = {}
    likeness: dict[str, dict[str, Numbers]] = {}
    for mixer in mixers:
        for role, axis in mixer.filters:
            slot = axis.slots[0]
            weight = checkpoint.read(mixer.name_of(slot)).float().flatten(1)
            by_head = weight[axis.all_rows(slot)[0]]  # [heads, width, taps]
            if mixer.layer in shown:
                filters.setdefault(str(mixer.layer), {})[role] = rounded(by_head, 3)
            likeness.setdefault(role, {})[str(mixer.layer)] = rounded(_likeness(by_head), 3)
    return FiltersRecord(**about, filters=filters, likeness=likeness)


def _likeness(by_head: torch.Tensor) -> torch.Tensor:
    """The mean cosine between two filters of the same head, [heads]."""
    unit = torch.nn.functional.normalize(by_head, dim=-1)
    count = unit.shape[1]
    return (unit.sum(1).square().sum(-1) - count) / max(1, count * (count - 1))


def rounded(values: torch.Tensor, digits: int | None = None) -> Any:
    """The numbers as nested tuples, to so many significant digits; None where one is not finite."""
    return _as_tuples(plain(values, digits))


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
