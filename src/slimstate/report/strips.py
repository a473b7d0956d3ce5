"""Which channels each head keeps: a strip for each head, a mark for each channel that is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from slimstate.report.markup import Html, element, joined, variable
from slimstate.report.numbers import magnitude

if TYPE_CHECKING:
    from slimstate.core.selection import Selection
    from slimstate.records.plan import Plan

HEIGHT, STRIDE = 4, 5  # of a strip, and from one strip to the next, in channel widths


def runs(kept: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Where a run of neighbouring channels starts, and how long it is."""
    start = end = -1
    for channel in sorted(kept):
        if channel != end:
            if end > start:
                yield start, end - start
            start = channel
        end = channel + 1
    if end > start:
        yield start, end - start


def strip_path(kept: Iterable[int], y: float) -> str:
    """The kept channels of a head as a dashed line of SVG."""
    words, position = [f"M0 {y:g}"], 0
    for start, length in runs(kept):
        words.append(f"m{start - position} 0h{length}" if start > position else f"h{length}")
        position = start + length
    return "".join(words)


def layer_strips(layer: int, selection: Selection, width: int) -> Html:
    """All heads of a layer that keeps channels, one below the other."""
    heads = selection.keep.tolist()
    rows = (
        element(
            "g",
            Html(f'<rect y="{head * STRIDE}" width="{width}" height="{HEIGHT}"/>'),
            Html(f'<path d="{strip_path(channels, head * STRIDE + HEIGHT / 2)}"/>'),
            data_tip=strip_tip(layer, selection, head, width),
            tabindex=-1,
        )
        for head, channels in enumerate(heads)
    )
    picture = element(
        "svg",
        *rows,
        viewBox=f"0 0 {width} {len(heads) * STRIDE - 1}",
        preserveAspectRatio="none",
        role="group",
        aria_label=f"Channels that the {len(heads)} heads of layer {layer} keep",
        style=variable("heads", len(heads)),
        data_width=width,
    )
    return element("div", element("span", f"layer {layer}"), picture, class_="strip")


def strip_tip(layer: int, selection: Selection, head: int, width: int) -> str:
    """What is known of one head."""
    lines = [f"layer {layer}, head {head}: keeps {selection.key_dim} of {width}"]
    claims = selection.certificate
    if "rho" in claims:
        lines.append(f"largest rho left {magnitude(claims['rho'][head])}")
    if {"condition_before", "condition_after"} <= claims.keys():
        before, after = (magnitude(claims[f"condition_{when}"][head]) for when in ("before", "after"))
        lines.append(f"condition number of the keys {before} → {after}")
    return "\n".join(lines)


def plan_strips(plan: Plan) -> Html:
    strips = (layer_strips(layer, selection, plan.width) for layer, selection in plan.channels.items())
    return element("div", joined(strips), class_="strips")
