"""The head of the page: which models it is about, and the few numbers that matter most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from slimstate.records.evaluation import EvaluationRecord, Result, Row, SweepRecord
from slimstate.records.folder import Records
from slimstate.records.numbers import ARROW, fixed, mebibytes, percent, perplexity, plural, signed
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.reports.plots.style import label_of
from slimstate.reports.provenance import Provenance
from slimstate.reports.sections import Traces, comparable, mean_utilisation, saved_share, trace_of
from slimstate.reports.tables import PER_TOKEN, perplexity_metric


class Card(NamedTuple):
    """A number, its name, and what it is about."""

    label: str
    value: str
    remark: str


def base_models(sources: Sequence[Provenance]) -> list[str]:
    """Return the uncut models that the records are about, each once; those with filters alone come last."""
    ordered = sorted(sources, key=lambda source: isinstance(source.file.record, FiltersRecord))
    return list(dict.fromkeys(source.base for source in ordered))


def summary_cards(records: Records) -> Iterator[Card]:
    """Yield cards of the first sweep; without one, of the first plan, evaluation and traces."""
    evaluation = records.evaluation[0].record if records.evaluation else None
    if records.sweep:
        yield from sweep_cards(records.sweep[0].record, records.trace)
    else:
        if records.plan:
            plan = records.plan[0].record
            yield Card("Key dim per head", f"{plan.width}{ARROW}{plan.key_dim}", f"by {plan.method}")
            yield Card("State saved", percent(plan.compression), plural(len(plan.selections), "layer"))
        if evaluation is not None:
            yield from evaluation_cards(evaluation, perplexities, perplexity)
        if records.trace:
            yield utilisation_card(comparable(records.trace)[0])
    if evaluation is not None:
        yield from evaluation_cards(evaluation, averages, partial(fixed, digits=3))


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
    yield Card("State saved", percent(saved_share(sweep, row)), f"{row.method}, key dim {row.key_dim} of {sweep.width}")
    yield sweep_perplexity_card(sweep, f"{signed(row.nats_over_uncut)} nats per token", row)
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
    where = "at the end of windows"
    if before is not None and after is not None:
        values, where = (mean_utilisation(before), mean_utilisation(after)), "over a text"
    change = ARROW.join(fixed(value, 3) for value in values)
    return Card("State in use", change, f"rank utilisation {where}, uncut and cut")


def evaluation_cards(
    record: EvaluationRecord, values: Callable[[Result], dict[str, float]], text: Callable[[float], str]
) -> Iterator[Card]:
    """Yield numbers of an evaluation by label, after those of its baseline."""
    baseline = {} if record.baseline is None else values(record.baseline)
    for label, value in values(record).items():
        both = [baseline[label], value] if label in baseline else [value]
        yield Card(label, ARROW.join(map(text, both)), label_of(record))


def perplexities(result: Result) -> dict[str, float]:
    units = {"token": result.perplexity, "word": result.word_perplexity}
    return {f"Perplexity per {unit}": value for unit, value in units.items() if value is not None}


def averages(result: Result) -> dict[str, float]:
    return {f"{name.replace('_', '-').capitalize()} average": value for name, value in result.averages.items()}


def utilisation_card(group: Sequence[TraceRecord]) -> Card:
    """Return the utilisation of the first model, and of the first cut model after it."""
    shown = [group[0], *[trace for trace in group[1:] if trace.cut is not None][:1]]
    return Card("State in use", ARROW.join(fixed(mean_utilisation(trace), 3) for trace in shown), label_of(shown[-1]))
