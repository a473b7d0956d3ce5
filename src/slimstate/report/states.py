"""The sections on states: how much of them is used as models read a text, and the filters in front of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from slimstate.records.evaluation import Row, SweepRecord, Uncut
from slimstate.records.folder import RecordFile
from slimstate.records.numbers import brief, fixed, magnitude
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.report.drawing import drawing, figure_id
from slimstate.report.heat import Scale, heat_map
from slimstate.report.plots import states as state_plots
from slimstate.report.plots.style import label_of

Traces = Sequence[RecordFile[TraceRecord]]
SAME = 0.0005  # below this difference two utilisations read the same


def state_section(traces: Traces, sweeps: Sequence[RecordFile[SweepRecord]] = ()) -> dict[str, Any]:
    """Return what the template shows of traces, a group for each text and shape of model."""
    groups = [_group_values(group, number) for number, group in enumerate(comparable(traces))]
    return {"differences": list(utilisation_differences(sweeps, traces)), "groups": groups}


def comparable(traces: Traces) -> list[list[TraceRecord]]:
    """Group traces of the same text through models of the same shape, uncut models first."""
    groups: dict[object, list[TraceRecord]] = {}
    for file in traces:
        trace = file.record
        text = None if trace.text is None else trace.text.digest
        groups.setdefault((trace.layers, trace.heads, text), []).append(trace)
    return [sorted(group, key=lambda trace: trace.cut is not None) for group in groups.values()]


def _group_values(group: Sequence[TraceRecord], number: int) -> dict[str, Any]:
    sampled = [trace for trace in group if trace.bounds.states]
    figures = {
        "utilisation": (state_plots.utilisation_curves(group), "Rank utilisation over tokens"),
        "spectra": (state_plots.spectra(group), "Histograms of singular values"),
        "spectrum": (state_plots.ordered_spectra(group), "Singular values by rank"),
    }
    if sampled:
        figures["retrieval"] = state_plots.retrieval(sampled), "Amplification of query noise between its bounds"
    return {
        "names": ", ".join(trace.name for trace in group),
        "text": group[0].text,
        "skip": group[0].skip,
        "drawings": {name: drawing(fig, figure_id(name, number), label) for name, (fig, label) in figures.items()},
        "utilisation_maps": utilisation_maps(group),
        "condition_maps": condition_maps(group),
        "states": sum(trace.bounds.states for trace in sampled),
        "violations": sum(trace.bounds.violations for trace in sampled),
        "max_drawn": state_plots.STATES_DRAWN,
        "is_thinned": any(
            trace.bounds.states > state_plots.STATES_DRAWN and not trace.bounds.violations for trace in sampled
        ),
    }


def utilisation_maps(group: Sequence[TraceRecord]) -> dict[str, Any]:
    """Return a map of rank utilisation for each model, and the legend of their colours."""
    scale = Scale.shared([trace.utilisation_by_head for trace in group])

    def text(value: float | None) -> str:
        return fixed(value).removeprefix("0")

    def tip(capacity: float, value: float | None) -> str:
        rank = "" if value is None else f"\neffective rank {value * capacity:.1f} of {capacity:g}"
        return f"utilisation {fixed(value, 3)}{rank}"

    maps = [
        {"label": label_of(trace), "summary": f"mean {fixed(mean_utilisation(trace), 3)}"}
        | heat_map(trace.layers, trace.utilisation_by_head, scale, text, partial(tip, trace.capacity))
        for trace in group
    ]
    return {"maps": maps, "legend": scale.legend(fixed)}


def condition_maps(group: Sequence[TraceRecord]) -> dict[str, Any]:
    """Return a map of condition numbers for each model, and the legend of their colours."""
    scale = Scale.shared([trace.kappa_by_head for trace in group], logarithmic=True)

    def tip(value: float | None) -> str:
        return f"condition number {magnitude(value)}"

    maps = []
    for trace in group:
        values = (math.inf if value is None else value for row in trace.kappa_by_head for value in row)
        median = statistics.median_high(values)
        summary = f"median {magnitude(None if median == math.inf else median)}"
        rows = heat_map(trace.layers, trace.kappa_by_head, scale, brief, tip)
        maps.append({"label": label_of(trace), "summary": summary, **rows})
    return {"maps": maps, "legend": scale.legend(magnitude)}


def mean_utilisation(trace: TraceRecord) -> float:
    """Return the rank utilisation of a model, a mean over layers and heads."""
    return statistics.fmean(value for row in trace.utilisation_by_head for value in row)


def trace_of(sweep: SweepRecord, row: Row | None, traces: Traces) -> TraceRecord | None:
    """Return the first trace of the model that a row of a sweep is about, or of the uncut model without a row.

    A model that was trained after the cut is another one.
    """
    base = sweep.settings.fingerprint

    def is_same(trace: TraceRecord) -> bool:
        cut = trace.cut
        if row is None or cut is None:
            return row is None and cut is None and trace.fingerprint == base
        is_cut = (cut.base_fingerprint, cut.method, cut.key_dim) == (base, row.method, row.key_dim)
        return is_cut and cut.score in (None, row.score) and not (cut.recovered or cut.history)

    return next((file.record for file in traces if base is not None and is_same(file.record)), None)


def utilisation_differences(sweeps: Sequence[RecordFile[SweepRecord]], traces: Traces) -> Iterator[str]:
    """Yield both utilisations of each model for which a sweep has another one than its trace.

    `analyze` looks at all states behind the first tokens, a sweep at those at the end of its windows.
    """
    for file in sweeps:
        sweep = file.record
        results: list[tuple[Uncut | Row, Row | None]] = [(sweep.uncut, None), *((row, row) for row in sweep.rows)]
        for result, row in results:
            trace, swept = trace_of(sweep, row, traces), result.rank_utilisation
            if trace is not None and swept is not None and abs(mean_utilisation(trace) - swept) >= SAME:
                yield f"{label_of(trace)} {fixed(swept, 3)}, here {fixed(mean_utilisation(trace), 3)}"


def filter_section(files: Sequence[RecordFile[FiltersRecord]]) -> dict[str, Any]:
    """Return a figure of the convolution filters of each model, and how similar they are within a head."""
    models = []
    for number, file in enumerate(files):
        record = file.record
        label = f"Convolution filters of {record.name}"
        means = {
            role: statistics.fmean(value for heads in layers.values() for value in heads)
            for role, layers in record.likeness.items()
        }
        picture = drawing(state_plots.filter_maps(record), figure_id("filters", number), label)
        models.append({"label": label_of(record), "drawing": picture, "similarity": means})
    return {"models": models}
