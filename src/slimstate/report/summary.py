"""The head of the page: which models it is about, and the few numbers that matter most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.folder import Found, Records
from slimstate.records.states import TraceRecord
from slimstate.records.sweep import Row, SweepRecord
from slimstate.report import plots
from slimstate.report.markup import Html, element, joined
from slimstate.report.numbers import ARROW, fixed, mebibytes, percent, perplexity, plural, signed
from slimstate.report.pieces import code, note
from slimstate.report.provenance import Provenance
from slimstate.report.states import comparable
from slimstate.report.tables import PER_TOKEN, Metric, perplexity_metric
from slimstate.report.tradeoff import saved
from slimstate.report.utilisation import mean_utilisation, trace_of

if TYPE_CHECKING:
    from slimstate.records.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Card:
    """A number, what it is of, and where it comes from."""

    label: str
    value: str
    remark: str

    def render(self) -> Html:
        return element(
            "div",
            element("span", self.label, class_="label"),
            element("strong", self.value),
            element("span", self.remark, class_="remark"),
            class_="card",
        )


def head(records: Records, names: Sequence[str]) -> Html:
    cards = list(summary_cards(records))
    skipped = plural(len(records.skipped), "file")
    return element(
        "header",
        element("h1", "slimstate report"),
        element("p", joined(map(code, names), " · "), class_="models"),
        element("div", *(card.render() for card in cards), class_="cards") if cards else None,
        note(f"{skipped} could not be used: ", element("a", "see below", href="#records"), ".")
        if records.skipped
        else None,
    )


def models(sources: Sequence[Provenance]) -> list[str]:
    """The models that were cut or looked at, each once, by the name of their base; those of filters alone last."""
    ordered = sorted(sources, key=lambda source: source.kind == "filters")
    return list(dict.fromkeys(source.base for source in ordered))


def summary_cards(records: Records) -> Iterator[Card]:
    """From the first sweep; without one, from the first plan, evaluation and traces."""
    evaluation = records.evaluation[0].record if records.evaluation else None
    if records.sweep:
        yield from sweep_cards(records.sweep[0].record, records.trace)
    else:
        if records.plan:
            yield from plan_cards(records.plan[0].record)
        if evaluation is not None:
            yield from perplexity_cards(evaluation)
        if records.trace:
            yield from utilisation_cards(comparable(records.trace)[0])
    if evaluation is not None:
        yield from average_cards(evaluation)


def sweep_cards(sweep: SweepRecord, traces: Sequence[Found[TraceRecord]]) -> Iterator[Card]:
    uncut, chosen = sweep.uncut, sweep.recommended
    if chosen is None or chosen.row is None:
        yield Card(label="State, MiB", value=mebibytes(uncut.state_bytes), remark="per sequence in fp32, uncut")
        yield perplexity_card(sweep, "uncut")
        return
    row = sweep.rows[chosen.row]
    which = "recommended" if chosen.within else "the mildest cut"
    before, after = mebibytes(uncut.state_bytes), mebibytes(row.state_bytes)
    kept = "in fp32" if row.state_dtype == "float32" else f"fp32 and {row.state_dtype}"
    yield Card(label="State, MiB", value=f"{before}{ARROW}{after}", remark=f"per sequence {kept}, uncut and {which}")
    remark = f"{row.method}, key dim {row.key_dim} of {sweep.width}"
    yield Card(label="State saved", value=percent(saved(sweep, row)), remark=remark)
    yield perplexity_card(sweep, f"{signed(row.nats_over_uncut)} nats per token", row)
    yield utilisation_card(sweep, row, traces)


def utilisation_card(sweep: SweepRecord, row: Row, traces: Sequence[Found[TraceRecord]]) -> Card:
    """As the section on states has it, where both models were looked into; otherwise as the sweep does."""
    before, after = trace_of(sweep, None, traces), trace_of(sweep, row, traces)
    used: tuple[float, float | None] = (sweep.uncut.rank_utilisation, row.rank_utilisation)
    where = "at the end of windows"
    if before is not None and after is not None:
        used, where = (mean_utilisation(before), mean_utilisation(after)), "over a text"
    value = f"{fixed(used[0], 3)}{ARROW}{fixed(used[1], 3)}"
    return Card(label="State in use", value=value, remark=f"rank utilisation {where}, uncut and cut")


def perplexity_card(sweep: SweepRecord, remark: str, row: Row | None = None) -> Card:
    """Per word where that is known, and the same per token in the remark."""
    metric = perplexity_metric(sweep)

    def pair(of: Metric) -> str:
        after = "" if row is None else f"{ARROW}{perplexity(of.of(row))}"
        return f"{perplexity(of.of(sweep.uncut))}{after}"

    per_token = "" if metric is PER_TOKEN else f"{pair(PER_TOKEN)} per token, "
    return Card(label=metric.words.capitalize(), value=pair(metric), remark=f"{per_token}{remark}")


def plan_cards(plan: Plan) -> Iterator[Card]:
    yield Card(label="Key dim per head", value=f"{plan.width}{ARROW}{plan.key_dim}", remark=f"by {plan.method}")
    yield Card(label="State saved", value=percent(plan.compression), remark=plural(len(plan.selections), "layer"))


def perplexity_cards(record: EvaluationRecord) -> Iterator[Card]:
    for name, unit in (("perplexity", "per token"), ("word_perplexity", "per word")):
        value: float | None = getattr(record, name)
        if value is not None:
            baseline: float | None = getattr(record.baseline, name, None)
            before = f"{perplexity(baseline)}{ARROW}" if baseline else ""
            yield Card(label=f"Perplexity {unit}", value=f"{before}{perplexity(value)}", remark=plots.label_of(record))


def utilisation_cards(group: Sequence[TraceRecord]) -> Iterator[Card]:
    """Of the first trace, and of the first after it that is of a cut model."""
    cut = next((trace for trace in group[1:] if trace.cut is not None), None)
    after = f"{ARROW}{fixed(mean_utilisation(cut), 3)}" if cut else ""
    remark = plots.label_of(cut or group[0])
    yield Card(label="State in use", value=f"{fixed(mean_utilisation(group[0]), 3)}{after}", remark=remark)


def average_cards(record: EvaluationRecord) -> Iterator[Card]:
    theirs = {} if record.baseline is None else record.baseline.averages
    for name, value in record.averages.items():
        before = f"{fixed(theirs[name], 3)}{ARROW}" if name in theirs else ""
        label = f"{name.replace('_', '-').capitalize()} average"
        yield Card(label=label, value=f"{before}{fixed(value, 3)}", remark=plots.label_of(record))
