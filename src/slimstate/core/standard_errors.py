"""Standard errors: of means, of shares, and of ratios of sums from the residual of each part, a window or a page."""

import math
import operator
import statistics
from collections.abc import Sequence


def standard_error(values: Sequence[float], others: Sequence[float] | None = None) -> float | None:
    """Return the standard error of the mean, or of the mean difference from others; None where it is not known."""
    others = [0.0] * len(values) if others is None else others
    if len(values) < 2 or len(values) != len(others):
        return None
    return statistics.stdev(map(operator.sub, values, others)) / math.sqrt(len(values))


def share_error(successes: float, count: int) -> float:
    """Return the standard error of a share after Agresti and Coull, which is above zero also for none and for all."""
    share = (successes + 2) / (count + 4)
    return math.sqrt(share * (1 - share) / (count + 4))


def ratio_residuals(amounts: Sequence[float], sizes: Sequence[float]) -> tuple[float, ...]:
    """Return by how much each part moves sum(amounts) / sum(sizes), to first order.

    The root of their sum of squares is the standard error. There are none with fewer than two parts, or where sizes
    are missing.
    """
    if len(sizes) < 2 or len(amounts) != len(sizes):
        return ()
    total, scale = math.fsum(sizes), math.sqrt(len(sizes) / (len(sizes) - 1))
    ratio = math.fsum(amounts) / total
    return tuple(scale * (amount - ratio * size) / total for amount, size in zip(amounts, sizes, strict=True))


def residual_error(
    residuals: Sequence[float], others: Sequence[float] | None = None, factor: float = 1.0
) -> float | None:
    """Return the standard error of a number, or of it less `factor` times another one of the same parts.

    None without residuals, or with other parts.
    """
    others = [0.0] * len(residuals) if others is None else others
    if not residuals or len(residuals) != len(others):
        return None
    return math.hypot(*(here - factor * there for here, there in zip(residuals, others, strict=True)))
