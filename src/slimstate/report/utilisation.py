"""How much of the state is used, as one number for each model.

`analyze` looks at all states behind the first tokens of a text, a sweep at those at the end of its windows. Where both
looked at a model the page tells the first, and says beside it what the second is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from slimstate.records.folder import Found
from slimstate.records.states import TraceRecord
from slimstate.records.sweep import Row, SweepRecord, Uncut
from slimstate.report import plots
from slimstate.report.markup import Html, joined
from slimstate.report.numbers import fixed
from slimstate.report.pieces import note

TOLD_APART = 0.0005  # below it both numbers read the same


def mean_utilisation(trace: TraceRecord) -> float:
    return statistics.fmean(value for row in trace.utilisation_by_head for value in row)


def trace_of(sweep: SweepRecord, row: Row | None, traces: Sequence[Found[TraceRecord]]) -> TraceRecord | None:
    """The first of the model that a row is of, or of the uncut one; a model that was trained since is another."""
    base = sweep.settings.fingerprint
    return next((found.record for found in traces if base is not None and _is_of(found.record, base, row)), None)


def _is_of(trace: TraceRecord, base: str, row: Row | None) -> bool:
    cut = trace.cut
    if row is None or cut is None:
        return row is None and cut is None and trace.fingerprint == base
    made = (cut.base_fingerprint, cut.method, cut.score or row.score, cut.key_dim)
    return made == (base, row.method, row.score, row.key_dim) and not (cut.recovered or cut.history)


def differing_note(sweeps: Sequence[Found[SweepRecord]], traces: Sequence[Found[TraceRecord]]) -> Html | None:
    """Both numbers of every model of which there are two."""
    lines = [line for found in sweeps for line in _differing(found.record, traces)]
    if not lines:
        return None
    why = "The sweep looked at the states at the end of each window alone, and found other means of the same models: "
    return note(why, joined(lines, "; "), ".")


def _differing(sweep: SweepRecord, traces: Sequence[Found[TraceRecord]]) -> list[str]:
    measured: list[tuple[Uncut | Row, Row | None]] = [(sweep.uncut, None), *((row, row) for row in sweep.rows)]
    lines = []
    for found, row in measured:
        trace, swept = trace_of(sweep, row, traces), found.rank_utilisation
        if trace is None or swept is None or abs(mean_utilisation(trace) - swept) < TOLD_APART:
            continue
        lines.append(f"{plots.label_of(trace)} {fixed(swept, 3)}, here {fixed(mean_utilisation(trace), 3)}")
    return lines
