"""The precision in which an engine keeps a state between two steps, and what it loses by that.

vLLM and SGLang compute a step in float32 and store the state in the type of their cache; the next step reads what was
stored. A step is one token when they decode, and in prefill all the tokens that are scheduled together: the loop over
chunks inside a kernel carries its state in float32. The output of a step comes from the state before it is stored.
Which files say so is on the page docs/serving/state_dtype.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimstate.system.errors import PlanError

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn}
SERVED = ("float32", "bfloat16")  # what engines offer today; others are simulated
SCALE_BYTES = 4  # of the float32 factor that each head of an fp8 state has


def check_state_dtypes(names: Sequence[str]) -> None:
    """They are known, there is one at least, and none is named twice."""
    for name in names:
        if name not in TYPES:
            raise PlanError(f"unknown `state_dtype` {name!r}; there are {', '.join(TYPES)}")
    if not names or len(set(names)) < len(names):
        raise PlanError("`state_dtypes` are one or more, each named once")


@dataclass(frozen=True, kw_only=True)
class StateRounding:
    """States are kept as `dtype` between steps of `every` tokens: 1 is decoding, more a prefill in pieces."""

    dtype: str = "float32"
    every: int = 1

    def __post_init__(self) -> None:
        check_state_dtypes((self.dtype,))
        if self.every < 1:
            raise PlanError(f"`state_every` {self.every}: a state is stored after at least one token")

    @property
    def is_exact(self) -> bool:
        """Whether nothing is lost: kernels compute in float32 too."""
        return self.dtype == "float32"

    @property
    def asked(self) -> dict[str, object]:
        """What a command has to say to do the same; nothing where nothing is lost."""
        return {} if self.is_exact else {"state_dtype": self.dtype, "state_every": self.every}

    def __call__(self, state: Tensor) -> Tensor:
        """A state [..., H, K, V], either way round, as it is read after it was stored.

        fp8 has a factor for each head and sequence, made anew at every step: the largest number becomes the largest
        that the type holds.
        """
        kind = TYPES[self.dtype]
        if kind is not torch.float8_e4m3fn:
            return state.to(kind).to(state.dtype)
        factor = state.abs().amax((-2, -1), keepdim=True) / torch.finfo(kind).max
        factor = factor.clamp_min(torch.finfo(torch.float32).tiny)
        return (state / factor).to(kind).to(state.dtype) * factor

    def bytes_of(self, elements: int, heads: int) -> int:
        """What so many elements take, those of so many heads."""
        kind = TYPES[self.dtype]
        return elements * kind.itemsize + (heads * SCALE_BYTES if kind is torch.float8_e4m3fn else 0)
