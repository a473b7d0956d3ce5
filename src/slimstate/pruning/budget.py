"""How much memory the recurrent state takes, and how many channels to keep.

Only the state itself is counted, per sequence; the last inputs that convolutions store are about a fiftieth of it.
"""

from __future__ import annotations

import math
from fractions import Fraction

from slimstate.core.layout import Mixer
from slimstate.pruning.options import MIB, STATE_BYTES, Budget
from slimstate.system.errors import PlanError

ALIGNMENT = 16


def state_bytes(mixers: tuple[Mixer, ...], key_dim: int) -> dict[str, int]:
    """Return the bytes of recurrent state per sequence, by data type."""
    elements = sum(mixer.state_elements // mixer.axis.width * key_dim for mixer in mixers)
    return {name: elements * size for name, size in STATE_BYTES.items()}


def key_dims_worth_choosing(width: int) -> list[int]:
    """Return the multiples of 16 below the width; for a narrow head, its halves."""
    if width > ALIGNMENT:
        return list(range((width - 1) // ALIGNMENT * ALIGNMENT, 0, -ALIGNMENT))
    return [width >> shift for shift in range(1, width.bit_length()) if width >> shift]


def fit_budget(budget: Budget, mixers: tuple[Mixer, ...]) -> tuple[int, str]:
    """Return the largest key dim worth choosing whose state fits, or the width if that does, and a line on why."""
    width = mixers[0].axis.width

    def size(key_dim: int) -> int:
        return state_bytes(mixers, key_dim)[budget.dtype]

    if size(width) <= budget.bytes:
        return width, f"the uncut state takes {size(width) / MIB:.4g} MiB and fits: {budget.describe()}"
    dims = key_dims_worth_choosing(width)
    fitting = [key_dim for key_dim in dims if size(key_dim) <= budget.bytes]
    if not fitting:
        least = f"even key dim {dims[-1]} takes {size(dims[-1]) / MIB:.4g} MiB" if dims else "it cannot be cut"
        raise PlanError(f"nothing fits {budget.describe()}: {least}")
    chosen = max(fitting)
    larger = min(key_dim for key_dim in (width, *dims) if key_dim > chosen)
    return chosen, (
        f"key dim {chosen} of {width}: {size(chosen) / MIB:.4g} MiB fit {budget.describe()};"
        f" {larger} would take {size(larger) / MIB:.4g}"
    )


def resolve_key_dim(
    width: int, compression: float | None, key_dim: int | None, *, allow_width: bool = False
) -> tuple[int, str]:
    """Return the key dim for a compression or a key dim, and a line that explains it."""
    if (compression is None) == (key_dim is None):
        raise PlanError("give either `key_dim` or `compression`, or a budget (`state_mb`, or `sequences`)")
    if key_dim is not None:
        if key_dim == width and not allow_width:
            raise PlanError(f"key dim {key_dim} is the width of the model: nothing to cut")
        if not 0 < key_dim <= width:
            raise PlanError(f"`key_dim` must be at least 1 and less than the width {width}, got {key_dim}")
        return key_dim, f"key dim {key_dim} of {width}"
    assert compression is not None
    if not 0 < compression < 1:
        raise PlanError(
            f"`compression` must lie between 0 and 1, got {compression:g}; 0.5 removes half of the channels"
        )
    return _rounded(width, compression)


def _rounded(width: int, compression: float) -> tuple[int, str]:
    """Return the nearest multiple of ALIGNMENT, where the width has room for one."""
    exact = width * (1 - Fraction(str(compression)))
    line = f"compression {compression:g} of {width} channels keeps {float(exact):g}"
    if width <= ALIGNMENT:
        key_dim = min(max(1, math.floor(exact + Fraction(1, 2))), width - 1)
        if not 0 < key_dim < width:
            raise PlanError(f"a width of {width} cannot be cut")
        return key_dim, f"{line}; key dim {key_dim}, too narrow for a multiple of {ALIGNMENT}"
    nearest = math.floor(exact / ALIGNMENT + Fraction(1, 2)) * ALIGNMENT
    key_dim = min(max(nearest, ALIGNMENT), (width - 1) // ALIGNMENT * ALIGNMENT)
    if key_dim == exact:
        return key_dim, line
    return key_dim, f"{line}, rounded to key dim {key_dim}, a multiple of {ALIGNMENT} (`key_dim` sets it exactly)"
