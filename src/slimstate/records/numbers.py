"""Format numbers for people to read. Unknown values are a dash."""

UNKNOWN = "–"
NO_DIFFERENCE = " (no difference)"
ARROW = " → "
HUGE = 1e6  # from here on decimals say nothing
ENOUGH_TOKENS = 50_000  # for small differences


def fixed(value: float | None, digits: int = 2) -> str:
    """Return a number with thousands separators and a fixed number of decimals."""
    return UNKNOWN if value is None else f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")


def perplexity(value: float | None, digits: int = 2) -> str:
    """Return a perplexity, or three significant digits where a model predicts so badly that it is huge."""
    return fixed(value, digits) if value is None or value < HUGE else f"{value:.3g}"


def is_none(difference: float, error: float | None) -> bool:
    """Return whether a difference is within two of its standard errors, and so none that a measurement shows."""
    return error is not None and abs(difference) <= 2 * error


def signed(value: float | None, error: float | None = None, unit: str = "", none: str = NO_DIFFERENCE) -> str:
    """Return a difference with its sign, three decimals and its standard error, and `none` where it is within two."""
    if value is None:
        return UNKNOWN
    is_tiny = abs(value) < 5e-4 and error is not None and not is_none(value, error)  # and would be shown as 0
    number = (f"{value:+.2g}" if is_tiny else f"{round(value, 3) + 0.0:+.3f}").replace("-", "−")
    return number + with_error("", error) + unit + (none if is_none(value, error) else "")


def with_error(text: str, error: float | None) -> str:
    """Return a number with its standard error, where that is known, to two significant digits."""
    return text if error is None else f"{text} ± {error:.2g}" if error < 100 else f"{text} ± {error:,.0f}"


def percent(share: float | None, digits: int = 0) -> str:
    """Return a share of 1 as a percentage."""
    return UNKNOWN if share is None else f"{100 * share:.{digits}f}%"


def format_mib(count: float) -> str:
    """Return a number of bytes in MiB with two decimals, or two digits where it is small, and the unit."""
    size = count / 2**20
    return f"{size:,.2f} MiB" if size >= 0.1 else f"{size:.2g} MiB"


def mebibytes(count: float) -> str:
    """Return a number of bytes in MiB, without the unit."""
    size = count / 2**20
    return f"{size:,.2f}" if size >= 1 else f"{size:.3g}"


def magnitude(value: float | None) -> str:
    """Return three significant digits of a number of any size; None is infinite, as for a singular matrix."""
    if value is None:
        return "∞"
    return f"{value:.3g}" if not 1000 <= abs(value) < HUGE else f"{value:,.0f}"


def brief(value: float | None) -> str:
    """Return a number in two or three characters, for a cell of a map; None is infinite."""
    if value is None:
        return "∞"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.0f}{letter}" if value < 1000 * size else f"{value:.0e}".replace("e+", "e")
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def caution(tokens: int | None) -> list[str]:
    """Return a line if a text is too short for small differences; else none."""
    if tokens is None or tokens >= ENOUGH_TOKENS:
        return []
    return [f"{tokens:,} tokens are few, and make standard errors uncertain, too: measure on {ENOUGH_TOKENS:,} or more"]


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: "1 head", "2 heads"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def epochs_text(epochs: float) -> str:
    """Return how often a text was trained on; one that is longer than the training has no known number of epochs."""
    return f"{epochs:.2f} epochs" if epochs > 1 else "no window twice"


def dims_text(key_dim: int, value_dim: int | None) -> str:
    """Return the dims of a cut: 64, or 64 x 32 where values are cut, too."""
    return str(key_dim) if value_dim is None else f"{key_dim} x {value_dim}"
