"""How many channels to keep: as asked for, or as many as a budget has room for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from slimstate.core.layout import Mixer
from slimstate.pruning.budget import Budget
from slimstate.system.errors import PlanError

ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class Target:
    """How much a cut is to keep, said in one of three ways: a `key_dim`, a `compression`, or a `budget`."""

    key_dim: int | None = None
    compression: float | None = None
    budget: Budget | None = None

    def resolve(self, mixers: tuple[Mixer, ...], *, whole: bool = False) -> tuple[int, str]:
        """The key dim, and a line on how it came about; `whole` allows the width itself."""
        width = mixers[0].axis.width
        if self.budget is None:
            return resolve_key_dim(width, self.compression, self.key_dim, whole=whole)
        if self.compression is not None or self.key_dim is not None:
            raise PlanError("a budget says how much is kept: leave out `compression` and `key_dim`")
        chosen, line = self.budget.choose(mixers)
        if chosen == width:
            raise PlanError(f"{line}; nothing to cut")
        return chosen, line


def resolve_key_dim(
    width: int, compression: float | None, key_dim: int | None, *, whole: bool = False
) -> tuple[int, str]:
    """The key dim that was asked for, and a line on how it came about; `whole` allows the width itself."""
    if (compression is None) == (key_dim is None):
        raise PlanError("give either `compression` or `key_dim`, or a budget (`state_mb`, `sequences`)")
    if key_dim is not None:
        if key_dim == width and not whole:
            raise PlanError(f"key dim {key_dim} is the width the model has: nothing to cut")
        if not 0 < key_dim <= width:
            raise PlanError(f"key dim {key_dim}: it must be at least 1 and less than the width {width}")
        return key_dim, f"key dim {key_dim} of {width}"
    assert compression is not None
    if not 0 < compression < 1:
        raise PlanError(f"compression {compression}: it must lie between 0 and 1; 0.5 removes half of the channels")
    return _rounded(width, compression)


def _rounded(width: int, compression: float) -> tuple[int, str]:
    """The nearest multiple of ALIGNMENT, where the width has room for one."""
    exact = width * (1 - Fraction(str(compression)))
    asked = f"compression {compression:g} of {width} channels keeps {float(exact):g}"
    if width <= ALIGNMENT:
        kept = min(max(1, math.floor(exact + Fraction(1, 2))), width - 1)
        if not 0 < kept < width:
            raise PlanError(f"a width of {width} cannot be cut")
        return kept, f"{asked}; key dim {kept}, too narrow for a multiple of {ALIGNMENT}"
    nearest = math.floor(exact / ALIGNMENT + Fraction(1, 2)) * ALIGNMENT
    kept = min(max(nearest, ALIGNMENT), (width - 1) // ALIGNMENT * ALIGNMENT)
    rounding = f", rounded to key dim {kept}, a multiple of {ALIGNMENT}"
    return kept, asked if kept == exact else asked + rounding
