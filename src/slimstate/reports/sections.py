"""Compute the values that the templates show and no record has: in the sections, and on the cards above them."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.colors import LogNorm, Normalize, to_hex, to_rgb

from slimstate.records.evaluation import EvaluationRecord, Measure, MeasurePair, Result, Row, SweepRecord, Uncut
from slimstate.records.folder import RecordFile, Records
from slimstate.records.numbers import ARROW, fixed, mebibytes, percent, perplexity, plural, signed, with_error
from slimstate.records.states import TraceRecord
from slimstate.reports.plots.style import label_of
from slimstate.reports.tables import PER_TOKEN, perplexity_metric

Traces = Sequence[RecordFile[TraceRecord]]
MIN_DIFFERENCE = 0.0005  # below this difference two utilisations read the same


def strip_path(channels: Iterable[int], y: float) -> str:
    """Return the channels that a head keeps as a line of SVG, with a dash for each run of neighbours."""
    path, end = f"M0 {y:g}", 0
    for _, run in groupby(enumerate(sorted(channels)), lambda pair: pair[1] - pair[0]):
        (_, start), *others = run
        path += f"m{start - end} 0" * (start > end) + f"h{len(others) + 1}"
        end = start + len(others) + 1
    return path


def saved_share(sweep: SweepRecord, row: Row) -> float:
    return 1 - row.state_bytes / sweep.uncut.state_bytes


def point_tips(sweep: SweepRecord) -> dict[str, str]:
    """Return what to show at each point of the figure of a sweep, by the id of the point."""
    uncut = sweep.uncut
    size = f"state {mebibytes(uncut.state_bytes)} MiB"
    tips = {"point-uncut": f"uncut, key dim {uncut.key_dim}\n{perplexities(uncut)}\n{size}"}
    for place, row in enumerate(sweep.rows):
        stored = "" if row.state_dtype == "float32" else f", state in {row.state_dtype}"
        tips[f"point-{place}"] = (
            f"{row.method} ({row.score}), key dim {row.dims}{stored}\n{perplexities(row)}\n"
            f"{signed(row.nats_over_uncut, row.nats_error, ' nats per token over uncut')}\n"
            f"state {mebibytes(row.state_bytes)} MiB, {percent(saved_share(sweep, row))} less"
        )
    return tips


def perplexities(result: Row | Uncut) -> str:
    """Return a perplexity in all units that are known."""
    per_word = "" if result.word_perplexity is None else f", {perplexity(result.word_perplexity)} per word"
    per_byte = "" if result.bits_per_byte is None else f", {fixed(result.bits_per_byte, 3)} bits per byte"
    return f"perplexity {perplexity(result.perplexity)} per token{per_word}{per_byte}"


def compared_measures(record: EvaluationRecord) -> list[tuple[Measure, Measure | None, MeasurePair | None]]:
    """Return each measure, that of the baseline and the pair of both: the text first, then tasks, then recall."""
    baseline = {} if record.baseline is None else {measure.name: measure for measure in _measures(record.baseline)}
    pairs = {pair.measure: pair for pair in record.compared}
    ordered = sorted(_measures(record), key=lambda measure: {"text": 0, "recall": 2}.get(measure.group, 1))
    return [(measure, baseline.get(measure.name), pairs.get(measure.name)) for measure in ordered]


def _measures(result: Result) -> Iterator[Measure]:
    yield from result.measures()
    if (nats := result.nats_per_token) is not None:
        name = "nats per token"
        yield Measure(group="text", name=name, label=name, value=nats, more_is_better=False, error=result.nats_error)


def recall_tips(results: Sequence[Result]) -> dict[str, str]:
    """Return what to show at each point of the recall figure, by the id of the point."""
    tips = {}
    for number, result in enumerate(results):
        for place, point in enumerate(result.recall_points):
            error = f" ± {percent(point.stderr)}" if point.stderr is not None else ""
            questions = f" of {plural(point.questions, 'question')}" if point.questions else ""
            accuracy = f"{point.pairs} pairs: {percent(point.accuracy)}{error}{questions}"
            tips[f"recall-{number}-{place}"] = f"{label_of(result)}\n{accuracy}"
    return tips


def group_traces(traces: Traces) -> list[list[TraceRecord]]:
    """Group traces of the same text through models of the same shape, uncut models first."""
    groups: dict[object, list[TraceRecord]] = {}
    for trace in (file.record for file in traces):
        text = None if trace.text is None else trace.text.digest
        groups.setdefault((trace.layers, trace.heads, text), []).append(trace)
    return [sorted(group, key=lambda trace: trace.cut is not None) for group in groups.values()]


def median_kappa(trace: TraceRecord) -> float | None:
    """Return the median condition number over layers and heads; None is infinite."""
    values = (math.inf if value is None else value for row in trace.kappa_by_head for value in row)
    median = statistics.median_high(values)
    return None if median == math.inf else median


def trace_of(sweep: SweepRecord, row: Row | None, traces: Traces) -> TraceRecord | None:
    """Return the first trace of the uncut model, or of the cut of a row, unless it was trained afterwards."""
    base = sweep.settings.fingerprint

    def is_same(trace: TraceRecord) -> bool:
        cut = trace.cut
        if row is None or cut is None:
            return row is None and cut is None and trace.fingerprint == base
        names = ("method", "key_dim", "value_dim")
        is_cut = cut.base_fingerprint == base and all(getattr(cut, name) == getattr(row, name) for name in names)
        return is_cut and cut.score in (None, row.score) and not (cut.reconstructed or cut.recovered or cut.history)

    return next((file.record for file in traces if base is not None and is_same(file.record)), None)


def utilisation_differences(sweeps: Sequence[RecordFile[SweepRecord]], traces: Traces) -> Iterator[str]:
    """Yield both utilisations of each model, at the ends of windows in a sweep and in its trace, where they differ."""
    for sweep in (file.record for file in sweeps):
        for row in (None, *sweep.rows):
            trace, swept = trace_of(sweep, row, traces), (row or sweep.uncut).rank_utilisation
            if trace is not None and swept is not None and abs(trace.mean_utilisation - swept) >= MIN_DIFFERENCE:
                yield f"{label_of(trace)} {fixed(swept, 3)}, here {fixed(trace.mean_utilisation, 3)}"


class Scale:
    """A scale from numbers to colours of viridis, linear from 0 or logarithmic."""

    ramp = tuple(to_hex(mpl.colormaps["viridis"](step / 8)) for step in range(9))  # from the lowest to the highest

    def __init__(self, low: float, high: float, logarithmic: bool = False) -> None:
        low, high = (max(value, 1e-12) if logarithmic else value for value in (low, high))
        self.norm = (LogNorm if logarithmic else Normalize)(low, high, clip=True)

    def colour(self, value: float) -> str:
        return to_hex(mpl.colormaps["viridis"](float(self.norm(value))))

    def is_dark(self, value: float) -> bool:
        red, green, blue = to_rgb(self.colour(value))
        return bool(0.299 * red + 0.587 * green + 0.114 * blue < 0.5)


def shared_scale(maps: Sequence[Sequence[Sequence[float | None]]], logarithmic: bool) -> Scale:
    """Return one scale for several maps, so that their colours can be compared."""
    numbers = [value for values in maps for row in values for value in row if value is not None] or [1.0]
    return Scale(min(numbers) if logarithmic else 0.0, max(numbers), logarithmic)


class Card(NamedTuple):
    """A number, its name, and what it is about."""

    label: str
    value: str
    remark: str


def summary_cards(records: Records) -> Iterator[Card]:
    """Yield cards of the first sweep, or of the first plan, then of every evaluation and of the traces."""
    if records.sweep:
        yield from sweep_cards(records.sweep[0].record, records.trace)
    elif records.plan:
        plan = records.plan[0].record
        if plan.cuts_keys:
            yield Card("Key dim per head", f"{plan.width}{ARROW}{plan.key_dim}", f"by {plan.method}")
        if plan.value_dim is not None:
            yield Card("Value dim per head", f"{plan.value_width}{ARROW}{plan.value_dim}", f"by {plan.value_method}")
        yield Card("State saved", percent(plan.state_saved), plural(len(plan.selections), "layer"))
    for evaluation in (file.record for file in records.evaluation):
        baseline = {} if evaluation.baseline is None else card_values(evaluation.baseline)
        for label, value in card_values(evaluation).items():
            both = [baseline[label], value] if label in baseline else [value]
            yield Card(label, ARROW.join(both), label_of(evaluation))
    if records.trace and not records.sweep:
        traces = group_traces(records.trace)[0]
        change = ARROW.join(fixed(trace.mean_utilisation, 3) for trace in traces)
        over = [signed(*traces[1].utilisation_over(traces[0]))] if len(traces) == 2 else []
        yield Card("State in use", change, ", ".join([*map(label_of, traces), *over]))


def card_values(result: Result) -> dict[str, str]:
    """Return perplexities, mean recall and averages of tasks by label."""
    units = {"Perplexity per token": result.perplexity, "Perplexity per word": result.word_perplexity}
    values = {label: perplexity(value) for label, value in units.items() if value is not None}
    if (recall := result.associative_recall) is not None and recall.mean is not None:
        values["Associative recall"] = with_error(fixed(recall.mean, 3), recall.stderr)
    names = {f"{name.replace('_', '-').capitalize()} average": value for name, value in result.averages.items()}
    return values | {label: fixed(value, 3) for label, value in names.items()}


def sweep_cards(sweep: SweepRecord, traces: Traces) -> Iterator[Card]:
    """Yield the state, the perplexity and the utilisation of the uncut model and of the recommended row."""
    uncut, best = mebibytes(sweep.uncut.state_bytes), sweep.recommended
    if best is None or best.row is None:
        yield Card("State, MiB", uncut, "per sequence in fp32, uncut")
        yield sweep_perplexity_card(sweep, "uncut")
        return
    row = sweep.rows[best.row]
    which = "recommended" if best.within else "smallest loss"
    stored = "in fp32" if row.state_dtype == "float32" else f"fp32 and {row.state_dtype}"
    yield Card("State, MiB", f"{uncut}{ARROW}{mebibytes(row.state_bytes)}", f"per sequence {stored}, uncut and {which}")
    yield Card("State saved", percent(saved_share(sweep, row)), f"{row.method}, key dim {row.dims} of {sweep.width}")
    yield sweep_perplexity_card(sweep, signed(row.nats_over_uncut, row.nats_error, " nats per token"), row)
    recalls = [result.associative_recall for result in (sweep.uncut, row)]
    if None not in recalls:
        change = ARROW.join(percent(recall.mean) for recall in recalls if recall is not None)
        yield Card("Associative recall", change, signed(row.recall_over_uncut, row.recall_error))
    yield sweep_utilisation_card(sweep, row, traces)


def sweep_perplexity_card(sweep: SweepRecord, remark: str, row: Row | None = None) -> Card:
    """Return the perplexity per word where it is known, with the one per token in the remark."""
    metric, models = perplexity_metric(sweep), (sweep.uncut,) if row is None else (sweep.uncut, row)
    change, per_token = (ARROW.join(perplexity(unit.value(model)) for model in models) for unit in (metric, PER_TOKEN))
    also = "" if metric is PER_TOKEN else f"{per_token} per token, "
    return Card(metric.long_title.capitalize(), change, f"{also}{remark}")


def sweep_utilisation_card(sweep: SweepRecord, row: Row, traces: Traces) -> Card:
    """Return the utilisation from traces where both models have one, otherwise from the sweep."""
    before, after = trace_of(sweep, None, traces), trace_of(sweep, row, traces)
    values: tuple[float, float | None] = (sweep.uncut.rank_utilisation, row.rank_utilisation)
    where, remark = "at the end of windows", ""
    if before is not None and after is not None:
        values, where = (before.mean_utilisation, after.mean_utilisation), "over a text"
        remark = f", {signed(*after.utilisation_over(before))}"
    change = ARROW.join(fixed(value, 3) for value in values)
    return Card("State in use", change, f"rank utilisation {where}, uncut and cut{remark}")
