"""What was cut: plans, with the channels that every head keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slimstate.records.folder import Found
from slimstate.report.markup import Html, element, joined
from slimstate.report.numbers import ARROW, magnitude, percent, plural
from slimstate.report.pieces import Section, code, facts, note
from slimstate.report.shapes import head_count
from slimstate.report.strips import plan_strips

SCORES = {"kq": "keys and queries", "k": "keys", "q": "queries"}
DRAWN = 250_000  # channels whose strips are drawn in full; of further plans the page gives the facts alone


def cut_section(plans: Sequence[Found]) -> Section | None:
    if not plans:
        return None
    left, bodies = DRAWN, []
    for number, found in enumerate(plans):
        left -= channels(found.data)
        bodies.append(plan_body(found, drawn=left >= 0 or number == 0, opened=number == 0))
    return Section(anchor="cut", title="What was cut", body=joined(bodies))


def channels(plan: Mapping[str, Any]) -> int:
    return plan["width"] * sum(map(head_count, plan["layers"].values()))


def is_rotation(plan: Mapping[str, Any]) -> bool:
    return any(layer.get("basis") is not None for layer in plan["layers"].values())


def plan_body(found: Found, drawn: bool, opened: bool) -> Html:
    plan = found.data
    drawn = drawn and not is_rotation(plan)
    heading = element("h3", plan["model"]["source"], f": key dim {plan['width']}{ARROW}{plan['key_dim']}")
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
        if drawn
        else note(
            "Every head keeps directions across its channels, not channels: there are no strips to draw."
            if is_rotation(plan)
            else "The strips of this plan are left out to keep the page small."
        )
    )
    return joined([heading, facts(plan_facts(found)), strips])


def plan_facts(found: Found) -> Iterator[tuple[str, object]]:
    plan = found.data
    heads, rotated = sum(map(head_count, plan["layers"].values())), is_rotation(plan)
    kept = "directions" if rotated else "channels"
    share = 1 - plan["key_dim"] / plan["width"]
    yield "Cut", f"{plan['key_dim']} of {plan['width']} {kept} kept in every head, {percent(share)} less state"
    yield "Where", f"{plural(len(plan['layers']), 'layer')}, {plural(heads, 'head')} ({plan['model_type']})"
    judge = SCORES.get(plan["score"], plan["score"])
    yield "Method", joined([code(plan["method"]), f"judging by {judge}"], " ")
    yield "Calibration", calibration_words(plan.get("calibration"))
    yield "Certificate", certificate_words(plan.get("certificate") or {})
    if plan.get("correction"):
        yield "Query scale", plan["correction"]
    elif plan.get("corrected") is True:
        factor = magnitude(plan["width"] / plan["key_dim"])
        yield "Config", joined([code("norm_eps"), f"times {factor}, which makes up for the new query scale"], " ")
    if parent := plan.get("parent"):
        yield "Cut before", f"key dim {parent['width']}{ARROW}{parent['key_dim']} by {parent['method']}"
    yield "Plan", code(found.path)


def calibration_words(calibration: Mapping[str, Any] | None) -> object:
    if not calibration:
        return "none: the weights alone decide, or chance"
    text = code(calibration.get("data") or "a text")
    if not (calibration.get("samples") and calibration.get("length")):
        return text
    return joined([plural(calibration["samples"], "window"), f"of {calibration['length']} tokens of", text], " ")


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
