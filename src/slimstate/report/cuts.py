"""What was cut: plans, with the channels that every head keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from slimstate.records.folder import Found
from slimstate.records.parts import Text
from slimstate.report.markup import Html, element, joined
from slimstate.report.numbers import ARROW, magnitude, percent, plural
from slimstate.report.pieces import Section, code, facts, note
from slimstate.report.strips import plan_strips

if TYPE_CHECKING:
    from slimstate.records.plan import Plan

SCORES = {"kq": "keys and queries", "k": "keys", "q": "queries"}
MEANINGS = {
    "rho": "Rho is how much the volume that the kept channels span would grow by the best exchange with one that was"
    " removed: 1 is none at all.",
    "condition_after": "A condition number is the largest singular value of a head's keys over the smallest: the larger"
    " it is, the closer some channels come to repeating others.",
}
DRAWN = 250_000  # channels whose strips are drawn in full; of further plans the page gives the facts alone


def cut_section(plans: Sequence[Found[Plan]]) -> Section | None:
    if not plans:
        return None
    left, bodies = DRAWN, []
    for number, found in enumerate(plans):
        left -= found.record.width * found.record.heads
        bodies.append(plan_body(found, drawn=left >= 0 or number == 0, opened=number == 0))
    return Section(anchor="cut", title="What was cut", body=joined(bodies))


def plan_body(found: Found[Plan], drawn: bool, opened: bool) -> Html:
    plan = found.record
    heading = element("h3", plan.model.source, f": key dim {plan.width}{ARROW}{plan.key_dim}")
    strips = (
        element(
            "details",
            element("summary", "Channels kept, by layer and head"),
            element(
                "figure",
                plan_strips(plan),
                element(
                    "figcaption",
                    "Each strip is a head, from its first channel on the left to its last on the right: "
                    "coloured channels stay, pale ones are removed.",
                ),
            ),
            open=opened,
        )
        if drawn and not plan.rotates
        else note(
            "Every head keeps directions across its channels, not channels: there are no strips to draw."
            if plan.rotates
            else "The strips of this plan are left out to keep the page small."
        )
    )
    return joined([heading, facts(plan_facts(found)), certificate_note(plan.summary()), strips])


def plan_facts(found: Found[Plan]) -> Iterator[tuple[str, object]]:
    plan = found.record
    kept = "directions" if plan.rotates else "channels"
    yield "Cut", f"{plan.key_dim} of {plan.width} {kept} kept in every head, {percent(plan.compression)} less state"
    layers, heads = plural(len(plan.selections), "layer"), plural(plan.heads, "head")
    yield "Where", f"{layers}, {heads} ({plan.model_type})"
    yield "Method", joined([code(plan.method), f"judging by {SCORES.get(plan.score, plan.score)}"], " ")
    yield "Calibration", calibration_words(plan.calibration)
    yield "Certificate", certificate_words(plan.summary())
    if plan.correction:
        yield "Query scale", plan.correction
    elif plan.corrected:
        factor = magnitude(plan.width / plan.key_dim)
        yield "Config", joined([code("norm_eps"), f"times {factor}, which makes up for the new query scale"], " ")
    if parent := plan.earlier_cut:
        yield "Cut before", f"key dim {parent.width}{ARROW}{parent.key_dim} by {parent.method}"
    yield "Plan", code(found.path)


def calibration_words(calibration: Text | None) -> object:
    if calibration is None:
        return "none: the weights alone decide, or chance"
    text = code(calibration.data or "a text")
    if not (calibration.samples and calibration.length):
        return text
    return joined([plural(calibration.samples, "window"), f"of {calibration.length} tokens of", text], " ")


def certificate_note(certificate: Mapping[str, float | None]) -> Html | None:
    """What the numbers of a certificate mean."""
    meanings = [words for name, words in MEANINGS.items() if name in certificate]
    return note(" ".join(meanings)) if meanings else None


def certificate_words(certificate: Mapping[str, float | None]) -> str | None:
    """The worst head of the whole model."""
    words = []
    if "rho" in certificate:
        exchanges = plural(int(certificate.get("swaps") or 0), "exchange")
        words.append(f"largest rho {magnitude(certificate['rho'])} after {exchanges}")
    if "variance_lost" in certificate:
        words.append(f"most variance that a head loses {percent(certificate['variance_lost'] or 0.0)}")
    if "condition_after" in certificate:
        before, after = (magnitude(certificate.get(f"condition_{when}")) for when in ("before", "after"))
        words.append(f"worst condition number of a head's keys {before}{ARROW}{after}")
    return "; ".join(words) or None
