"""How much memory the recurrent state takes, and the largest key dim that fits into a given one.

Counted is the state itself, per sequence; the few last inputs that convolutions keep are about a fiftieth of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from slimstate.core.layout import Mixer
from slimstate.core.state_dtype import StateRounding
from slimstate.system.errors import PlanError

BYTES = {"fp32": 4, "bf16": 2}
MIB, GIB = 2**20, 2**30


def state_bytes(mixers: tuple[Mixer, ...], key_dim: int) -> dict[str, int]:
    """Bytes of recurrent state per sequence."""
    elements = sum(mixer.state_elements // mixer.axis.width * key_dim for mixer in mixers)
    return {name: elements * size for name, size in BYTES.items()}


def stored_bytes(mixers: tuple[Mixer, ...], key_dim: int, rounding: StateRounding) -> int:
    """Bytes of recurrent state per sequence, kept as `rounding` says."""
    return sum(
        rounding.bytes_of(mixer.state_elements // mixer.axis.width * key_dim, mixer.value_heads) for mixer in mixers
    )


def key_dims_worth_choosing(width: int) -> list[int]:
    """Multiples of 16 below the width; of a narrow head, its halves."""
    if width > 16:
        return list(range((width - 1) // 16 * 16, 0, -16))
    return [width >> shift for shift in range(1, width.bit_length()) if width >> shift]


def check_kept_in(state_dtype: str) -> None:
    """What an engine keeps states in is known."""
    if state_dtype not in BYTES:
        raise PlanError(f"unknown `state_dtype` {state_dtype!r}; there are {', '.join(BYTES)}")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory for the state of one sequence: given as such, or as the memory that so many sequences share.

    Parameters:
        state_mb: MiB for one sequence.
        sequences: how many there are at once.
        memory_gb: GiB that they share.
        state_dtype: what the engine keeps states in: "fp32" or "bf16".

    Examples:
        >>> slimstate.prune("model", "slim", budget=slimstate.Budget(sequences=512, memory_gb=20), method="l1")
    """

    state_mb: float | None = None
    sequences: int | None = None
    memory_gb: float | None = None
    state_dtype: str = "fp32"

    def __post_init__(self) -> None:
        check_kept_in(self.state_dtype)
        shared = self.sequences is not None and self.memory_gb is not None
        if (self.state_mb is None) != shared or (self.state_mb is not None and (self.sequences or self.memory_gb)):
            raise PlanError("a budget is `state_mb` for one sequence, or `sequences` and `memory_gb` together")
        if self.bytes <= 0 or (self.sequences is not None and self.sequences < 1):
            raise PlanError("a budget must be more than nothing")

    @property
    def bytes(self) -> float:
        """Per sequence."""
        if self.state_mb is not None:
            return self.state_mb * MIB
        assert self.sequences is not None
        assert self.memory_gb is not None
        return self.memory_gb * GIB / max(1, self.sequences)

    def describe(self) -> str:
        each = f"{self.bytes / MIB:.4g} MiB per sequence in {self.state_dtype}"
        if self.state_mb is not None:
            return each
        return f"{self.memory_gb:g} GiB for {self.sequences} sequences, {each}"

    def choose(self, mixers: tuple[Mixer, ...]) -> tuple[int, str]:
        """The largest key dim worth choosing whose state fits, or the width if that does; and a line on why."""
        width = mixers[0].axis.width

        def size(key_dim: int) -> int:
            return state_bytes(mixers, key_dim)[self.state_dtype]

        if size(width) <= self.bytes:
            return width, f"the uncut state takes {size(width) / MIB:.4g} MiB and fits: {self.describe()}"
        dims = key_dims_worth_choosing(width)
        fitting = [key_dim for key_dim in dims if size(key_dim) <= self.bytes]
        if not fitting:
            least = f"even key dim {dims[-1]} takes {size(dims[-1]) / MIB:.4g} MiB" if dims else "it cannot be cut"
            raise PlanError(f"nothing fits {self.describe()}: {least}")
        chosen = max(fitting)
        larger = min(key_dim for key_dim in (width, *dims) if key_dim > chosen)
        return chosen, (
            f"key dim {chosen} of {width}: {size(chosen) / MIB:.4g} MiB fit {self.describe()};"
            f" {larger} would take {size(larger) / MIB:.4g}"
        )
