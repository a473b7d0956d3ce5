"""Which channels each head keeps: a strip for each head, a mark for each channel that is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from slimstate.report.markup import Html, element, joined
from slimstate.report.numbers import magnitude

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


def layer_strips(name: str, layer: Mapping[str, Any], width: int) -> Html:
    """All heads of a layer, one below the other."""
    heads: Sequence[Sequence[int]] = layer["keep"]
    rows = (
        element(
            "g",
            Html(f'<rect y="{head * STRIDE}" width="{width}" height="{HEIGHT}"/>'),
            Html(f'<path d="{strip_path(kept, head * STRIDE + HEIGHT / 2)}"/>'),
            data_tip=strip_tip(name, head, len(kept), width, layer),
            tabindex=-1,
        )
        for head, kept in enumerate(heads)
    )
    picture = element(
        "svg",
        *rows,
        viewBox=f"0 0 {width} {len(heads) * STRIDE - 1}",
        preserveAspectRatio="none",
        role="group",
        aria_label=f"Channels that the {len(heads)} heads of layer {name} keep",
        style=f"--heads:{len(heads)}",
        data_width=width,
    )
    return element("div", element("span", f"layer {name}"), picture, class_="strip")


def strip_tip(name: str, head: int, kept: int, width: int, layer: Mapping[str, Any]) -> str:
    """What is known of one head."""
    lines = [f"layer {name}, head {head}: keeps {kept} of {width}"]
    if layer.get("rho"):
        lines.append(f"largest rho left {magnitude(layer['rho'][head])}")
    if layer.get("condition_before") and layer.get("condition_after"):
        before, after = (magnitude(layer[f"condition_{when}"][head]) for when in ("before", "after"))
        lines.append(f"condition number of the keys {before} → {after}")
    return "\n".join(lines)


def plan_strips(plan: Mapping[str, Any]) -> Html:
    strips = (layer_strips(name, layer, plan["width"]) for name, layer in plan["layers"].items())
    return element("div", joined(strips), class_="strips")
