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
    """Return by how much each part moves sum(amounts) / sum(sizes), to first order; none where parts are missing."""
    if not sizes or len(amounts) != len(sizes):
        return ()
    total = math.fsum(sizes)
    ratio = math.fsum(amounts) / total
    return tuple((amount - ratio * size) / total for amount, size in zip(amounts, sizes, strict=True))


def residual_error(
    residuals: Sequence[float], others: Sequence[float] | None = None, factor: float = 1.0
) -> float | None:
    """Return the standard error of a number, or of it less `factor` times another one of the same parts.

    None with fewer than two parts, or with other parts.
    """
    others = [0.0] * len(residuals) if others is None else others
    if len(residuals) < 2 or len(residuals) != len(others):
        return None
    spread = math.hypot(*(here - factor * there for here, there in zip(residuals, others, strict=True)))
    return spread * math.sqrt(len(residuals) / (len(residuals) - 1))
