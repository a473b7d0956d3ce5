"""The precision in which an engine stores a state between two steps, and the rounding error of that.

vLLM and SGLang compute a step in float32 and store the state in the type of their cache; the next step reads what was
stored. A step is one token in decoding, and in prefill all tokens that are scheduled together: the loop over chunks
inside a kernel carries its state in float32. The output of a step comes from the state before it is stored. The sources
are on the page docs/serving/state_dtype.md.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slimstate.core.layout import Mixer
from slimstate.system.errors import PlanError
from slimstate.system.value import Value

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn}
SERVED = ("float32", "bfloat16")  # in engines today; others are simulated
SCALE_BYTES = 4  # of the float32 scale of each head of an fp8 state


def check_state_dtypes(names: Sequence[str], option: str = "state_dtypes") -> None:
    """Check that the names are known, not empty and unique."""
    for name in names:
        if name not in TYPES:
            raise PlanError(f"unknown `{option}` {name!r}; there are {', '.join(TYPES)}")
    if not names or len(set(names)) < len(names):
        raise PlanError("`state_dtypes` must be one or more different names")


class StateRounding(Value):
    """Rounding of states to `dtype` after every `every` tokens: 1 is decoding, more is a prefill in pieces."""

    dtype: str = "float32"
    every: int = 1

    def __post_init__(self) -> None:
        check_state_dtypes((self.dtype,), "state_dtype")
        if self.every < 1:
            raise PlanError(f"`state_every` must be at least 1, got {self.every}")

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded: kernels compute in float32, too."""
        return self.dtype == "float32"

    def advice(self) -> str | None:
        """Return a line on what the rounding costs in time, or None where that is little."""
        if self.is_exact or self.every > 1:
            return None
        where = f"states in {self.dtype} are stored after every token, by recurrences in PyTorch"
        return f"{where}, which is several times as slow as float32; a `state_every` above 1 is faster"

    def __call__(self, state: Tensor) -> Tensor:
        """Return a state [..., H, K, V] or [..., H, V, K] as it is read after it was stored.

        fp8 has a scale for each head and sequence, computed at every step: the largest number becomes the largest of
        the type.
        """
        kind = TYPES[self.dtype]
        if kind is not torch.float8_e4m3fn:
            return state.to(kind).to(state.dtype)
        factor = state.abs().amax((-2, -1), keepdim=True) / torch.finfo(kind).max
        factor = factor.clamp_min(torch.finfo(torch.float32).tiny)
        return (state / factor).to(kind).to(state.dtype) * factor

    def state_bytes(self, mixers: Sequence[Mixer], key_dim: int, value_dim: int | None = None) -> int:
        """Return the bytes of recurrent state per sequence as it is stored."""
        kind = TYPES[self.dtype]
        elements = sum(mixer.state_elements(key_dim, value_dim) for mixer in mixers)
        scales = sum(mixer.value_heads for mixer in mixers) if kind is torch.float8_e4m3fn else 0
        return elements * kind.itemsize + scales * SCALE_BYTES
