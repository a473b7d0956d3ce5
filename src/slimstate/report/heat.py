"""Numbers by layer and head as the coloured cells of a table, which can be read, pointed at and printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.colors import to_hex

MAX_ROOMY_HEADS = 8  # with more heads only colours are shown, so that models fit side by side
ByHead = Sequence[Sequence[float | None]]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A scale from numbers to colours of viridis, linear or logarithmic."""

    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def shared(cls, maps: Sequence[ByHead], logarithmic: bool = False) -> Scale:
        """Return one scale for several maps, so that their colours can be compared."""
        known = [value for values in maps for row in values for value in row if value is not None] or [1.0]
        return cls(low=min(known) if logarithmic else 0.0, high=max(known), logarithmic=logarithmic)

    def share(self, value: float) -> float:
        """Return where a value lies between low and high, from 0 to 1."""
        low, high, value = (math.log(max(x, 1e-12)) if self.logarithmic else x for x in (self.low, self.high, value))
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def colour(self, value: float) -> tuple[str, bool]:
        """Return the colour of a value, and whether it is dark."""
        red, green, blue, _ = mpl.colormaps["viridis"](self.share(value))
        return to_hex((red, green, blue)), 0.299 * red + 0.587 * green + 0.114 * blue < 0.5

    def legend(self, text: Callable[[float], str]) -> dict[str, Any]:
        """Return the ends of the scale as text, and colours from the lowest to the highest value."""
        stops = [to_hex(mpl.colormaps["viridis"](step / 8)) for step in range(9)]
        return {"low": text(self.low), "high": text(self.high), "stops": ",".join(stops)}


def heat_map(
    layers: Sequence[int],
    values: ByHead,
    scale: Scale,
    text: Callable[[float | None], str],
    tip: Callable[[float | None], str],
) -> dict[str, Any]:
    """Return a row for each layer with a cell for each head; `tip` says in full what a value is."""

    def cell(layer: int, head: int, value: float | None) -> dict[str, Any]:
        colour, dark = (None, False) if value is None else scale.colour(value)
        return {"text": text(value), "tip": f"layer {layer}, head {head}: {tip(value)}", "colour": colour, "dark": dark}

    rows = [
        (layer, [cell(layer, head, value) for head, value in enumerate(row)])
        for layer, row in zip(layers, values, strict=True)
    ]
    return {"rows": rows, "heads": len(values[0]), "is_dense": len(values[0]) > MAX_ROOMY_HEADS}
