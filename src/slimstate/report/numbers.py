"""Numbers as people read them. What is not known is a dash."""

from __future__ import annotations

UNKNOWN = "–"
ARROW = " → "
HUGE = 1e6  # above it decimals say nothing


def fixed(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")


def perplexity(value: float | None, digits: int = 2) -> str:
    """Which may be of any size where a model predicts nothing, above all per word."""
    return fixed(value, digits) if value is None or value < HUGE else f"{value:.3g}"


def signed(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:+.3f}".replace("-", "−")


def percent(share: float | None, digits: int = 0) -> str:
    return UNKNOWN if share is None else f"{100 * share:.{digits}f}%"


def mebibytes(count: float) -> str:
    """The number alone, since its unit stands in the label more often than beside it."""
    size = count / 2**20
    return f"{size:,.2f}" if size >= 1 else f"{size:.3g}"


def magnitude(value: float | None) -> str:
    """Three digits of a number that may be of any size; singular matrices have no condition number."""
    if value is None:
        return "∞"
    return f"{value:.3g}" if not 1000 <= abs(value) < 1e6 else f"{value:,.0f}"


def brief(value: float | None) -> str:
    """Two or three characters, for a cell of a map."""
    if value is None:
        return "∞"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.0f}{letter}" if value < 1000 * size else f"{value:.0e}".replace("e+", "e")
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def plural(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"
