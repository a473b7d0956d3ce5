"""Numbers by layer and head as a table with coloured cells, which can be read, pointed at and printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.colors import to_hex

from slimstate.report.markup import Html, element, variable

ROOMY = 8  # heads; with more of them colours alone are shown, so that models can stand side by side
Values = Sequence[Sequence[float | None]]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From a number to a colour of viridis, by the number itself or by its logarithm."""

    low: float
    high: float
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where the value lies between low and high, 0 to 1."""
        low, high, value = (math.log(max(x, 1e-12)) if self.logarithmic else x for x in (self.low, self.high, value))
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def colour(self, value: float) -> tuple[str, bool]:
        """The colour, and whether it is a dark one."""
        red, green, blue, _ = mpl.colormaps["viridis"](self.share(value))
        return to_hex((red, green, blue)), 0.299 * red + 0.587 * green + 0.114 * blue < 0.5


def common_scale(maps: Sequence[Values], logarithmic: bool = False) -> Scale:
    """One scale for several maps, so that their colours can be compared."""
    known = [value for values in maps for row in values for value in row if value is not None]
    if not known:
        return Scale(low=1.0, high=1.0, logarithmic=logarithmic)
    return Scale(low=min(known) if logarithmic else 0.0, high=max(known), logarithmic=logarithmic)


def heat_map(
    caption: object,
    layers: Sequence[int],
    values: Values,
    scale: Scale,
    shown: Callable[[float | None], str],
    tip: Callable[[int, int, float | None], str],
) -> Html:
    """A row for each layer and a column for each head; `tip` says all of a layer, a head and its value."""
    heads = (element("th", head, scope="col") for head in range(len(values[0])))
    body = (
        element(
            "tr",
            element("th", layer, scope="row"),
            *(_cell(value, scale, shown(value), tip(layer, head, value)) for head, value in enumerate(row)),
        )
        for layer, row in zip(layers, values, strict=True)
    )
    corner = element("td", "layer \\ head", class_="corner")
    whole = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", corner, *heads)),
        element("tbody", *body),
        class_="heat" if len(values[0]) <= ROOMY else "heat dense",
    )
    return element("div", whole, class_="scroll")


def _cell(value: float | None, scale: Scale, shown: str, tip: str) -> Html:
    if value is None:
        return element("td", shown, class_="none", tabindex=-1, data_tip=tip)
    colour, dark = scale.colour(value)
    return element("td", shown, class_="deep" if dark else None, style=variable("c", colour), tabindex=-1, data_tip=tip)


def legend(scale: Scale, shown: Callable[[float], str]) -> Html:
    """The colours from the lowest to the highest value."""
    stops = ",".join(to_hex(mpl.colormaps["viridis"](step / 8)) for step in range(9))
    bar = element("span", class_="ramp", style=f"background:linear-gradient(to right,{stops})")
    return element("p", shown(scale.low), bar, shown(scale.high), class_="legend", aria_hidden="true")
