"""The head of the page: which models it is about, and the few numbers that matter most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimstate.records.folder import Found
from slimstate.report import plots
from slimstate.report.markup import Html, element, joined
from slimstate.report.numbers import ARROW, fixed, mebibytes, percent, plural, signed
from slimstate.report.pieces import code, note
from slimstate.report.states import comparable, mean_utilisation
from slimstate.report.tradeoff import saved

Records = Mapping[str, Sequence[Found]]


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


def head(records: Records, skipped: Sequence[str]) -> Html:
    names = models(records)
    cards = list(summary_cards(records))
    return element(
        "header",
        element("h1", "slimstate report"),
        element("p", joined(map(code, names), " · "), class_="models"),
        element("div", *(card.render() for card in cards), class_="cards") if cards else None,
        note(f"{plural(len(skipped), 'file')} could not be used: ", element("a", "see below", href="#records"), ".")
        if skipped
        else None,
    )


def models(records: Records) -> list[str]:
    """The models that were cut or looked at, each once, by the name of their base."""
    found: list[str] = []
    for kind in ("sweep", "plan", "recovery", "trace", "evaluation", "filters"):
        for record in records.get(kind, ()):
            data = record.data
            base = (data.get("cut") or {}).get("base_model")
            found.append(str(base or (data["model"]["source"] if kind == "plan" else data["model"])))
    return list(dict.fromkeys(found))


def summary_cards(records: Records) -> Iterator[Card]:
    """From the first sweep; without one, from the first plan, evaluation and traces."""
    if records.get("sweep"):
        yield from sweep_cards(records["sweep"][0].data)
    else:
        yield from plan_cards(records)
        yield from perplexity_cards(records)
        yield from utilisation_cards(records)
    yield from average_cards(records)


def sweep_cards(sweep: Mapping[str, Any]) -> Iterator[Card]:
    uncut, chosen = sweep["uncut"], sweep.get("recommended") or {}
    if chosen.get("row") is None:
        yield Card(label="State, MiB", value=mebibytes(uncut["state_bytes"]), remark="per sequence in fp32, uncut")
        yield Card(label="Perplexity", value=fixed(uncut["perplexity"]), remark="uncut")
        return
    row = sweep["rows"][chosen["row"]]
    which = "recommended" if chosen.get("within") else "the mildest cut"
    before, after = mebibytes(uncut["state_bytes"]), mebibytes(row["state_bytes"])
    yield Card(label="State, MiB", value=f"{before}{ARROW}{after}", remark=f"per sequence in fp32, uncut and {which}")
    remark = f"{row['method']}, key dim {row['key_dim']} of {sweep['width']}"
    yield Card(label="State saved", value=percent(saved(sweep, row)), remark=remark)
    perplexity = f"{fixed(uncut['perplexity'])}{ARROW}{fixed(row.get('perplexity'))}"
    yield Card(label="Perplexity", value=perplexity, remark=f"{signed(row.get('nats_over_uncut'))} nats per token")
    used = f"{fixed(uncut['rank_utilisation'], 3)}{ARROW}{fixed(row.get('rank_utilisation'), 3)}"
    yield Card(label="State in use", value=used, remark="rank utilisation, uncut and cut")


def plan_cards(records: Records) -> Iterator[Card]:
    for found in records.get("plan", ())[:1]:
        plan = found.data
        dims = f"{plan['width']}{ARROW}{plan['key_dim']}"
        yield Card(label="Key dim per head", value=dims, remark=f"by {plan['method']}")
        share = percent(1 - plan["key_dim"] / plan["width"])
        yield Card(label="State saved", value=share, remark=f"{plural(len(plan['layers']), 'layer')}")


def perplexity_cards(records: Records) -> Iterator[Card]:
    for found in records.get("evaluation", ())[:1]:
        result, baseline = found.data, found.data.get("baseline") or {}
        if result.get("perplexity") is None:
            continue
        before = f"{fixed(baseline['perplexity'])}{ARROW}" if baseline.get("perplexity") else ""
        yield Card(label="Perplexity", value=f"{before}{fixed(result['perplexity'])}", remark=plots.label_of(result))


def utilisation_cards(records: Records) -> Iterator[Card]:
    """Of the first trace, and of the first after it that is of a cut model."""
    for group in comparable(records.get("trace", ()))[:1]:
        cut = next((trace for trace in group[1:] if trace.get("cut")), None)
        after = f"{ARROW}{fixed(mean_utilisation(cut), 3)}" if cut else ""
        remark = plots.label_of(cut or group[0])
        yield Card(label="State in use", value=f"{fixed(mean_utilisation(group[0]), 3)}{after}", remark=remark)


def average_cards(records: Records) -> Iterator[Card]:
    for found in records.get("evaluation", ())[:1]:
        averages = (found.data.get("lm_eval") or {}).get("averages") or {}
        theirs = ((found.data.get("baseline") or {}).get("lm_eval") or {}).get("averages") or {}
        for name, value in averages.items():
            before = f"{fixed(theirs[name], 3)}{ARROW}" if name in theirs else ""
            label = f"{name.replace('_', '-').capitalize()} average"
            yield Card(label=label, value=f"{before}{fixed(value, 3)}", remark=plots.label_of(found.data))
