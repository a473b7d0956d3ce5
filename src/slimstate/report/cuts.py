"""The section on cuts: each plan, with the channels that every head keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from slimstate.records.folder import RecordFile
from slimstate.records.numbers import ARROW, magnitude, percent, plural

if TYPE_CHECKING:
    from slimstate.core.selection import Certificate
    from slimstate.records.plan import Plan

SCORES = {"kq": "keys and queries", "k": "keys", "q": "queries"}
MAX_CHANNELS = 250_000  # channels whose strips are drawn; further plans are shown without
HEIGHT, STRIDE = 4, 5  # height of a strip and distance from one to the next, in channel widths


def cut_section(plans: Sequence[RecordFile[Plan]]) -> dict[str, Any]:
    """Return what the template shows of every plan; the strips of the first are always drawn."""
    cuts, channels = [], 0
    for number, file in enumerate(plans):
        plan = file.record
        channels += plan.width * plan.heads
        is_drawn = not plan.rotates and (number == 0 or channels <= MAX_CHANNELS)
        cuts.append(
            {
                "path": file.path,
                "plan": plan,
                "score": SCORES.get(plan.score, plan.score),
                "certificate": certificate_text(plan.summary()),
                "claims": plan.summary(),
                "layers": [(layer, layer_strips(plan, layer)) for layer in plan.channels] if is_drawn else [],
            }
        )
    return {"cuts": cuts, "height": HEIGHT, "stride": STRIDE}


def certificate_text(certificate: Mapping[str, float | None]) -> str:
    """Return the certificate of the worst head of the whole model."""
    claims = []
    if "rho" in certificate:
        swaps = plural(int(certificate.get("swaps") or 0), "swap")
        claims.append(f"largest rho {magnitude(certificate['rho'])} after {swaps}")
    if "variance_lost" in certificate:
        claims.append(f"largest share of variance lost by a head {percent(certificate['variance_lost'] or 0.0)}")
    if "condition_after" in certificate:
        before, after = (magnitude(certificate.get(f"condition_{when}")) for when in ("before", "after"))
        claims.append(f"largest condition number of a head's keys {before}{ARROW}{after}")
    return "; ".join(claims)


def layer_strips(plan: Plan, layer: int) -> list[dict[str, Any]]:
    """Return a strip for each head of a layer: its SVG path and its tip."""
    selection, strips = plan.channels[layer], []
    for head, channels in enumerate(selection.keep.tolist()):
        title = f"layer {layer}, head {head}: keeps {len(channels)} of {plan.width}"
        y = head * STRIDE
        tip = "\n".join([title, *head_claims(selection.certificate, head)])
        strips.append({"y": y, "path": strip_path(channels, y + HEIGHT / 2), "tip": tip})
    return strips


def head_claims(certificate: Certificate, head: int) -> Iterator[str]:
    """Yield the claims of one head."""
    if "rho" in certificate:
        yield f"largest rho left {magnitude(certificate['rho'][head])}"
    if {"condition_before", "condition_after"} <= certificate.keys():
        before, after = (magnitude(certificate[f"condition_{when}"][head]) for when in ("before", "after"))
        yield f"condition number of the keys {before}{ARROW}{after}"


def strip_path(channels: Iterable[int], y: float) -> str:
    """Return the channels that a head keeps as a dashed line of SVG."""
    words, position = [f"M0 {y:g}"], 0
    for start, length in runs(channels):
        words.append(f"m{start - position} 0h{length}" if start > position else f"h{length}")
        position = start + length
    return "".join(words)


def runs(channels: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and the length of each run of neighbouring channels."""
    for _, group in groupby(enumerate(sorted(channels)), lambda pair: pair[1] - pair[0]):
        run = [channel for _, channel in group]
        yield run[0], len(run)
