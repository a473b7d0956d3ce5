"""How the layers of flash-linear-attention call a recurrence: packed sequences, norms inside, half precision outside.

A recurrence is a function of tensors by token, a `scale` and a `state`, which returns outputs and the last state.
`call` gives it what fla's layers pass on; the module of the recurrence has the functions that these layers look for.
B batch, T time, H key heads, G value heads, K key dim, V value dim; states [B, G, K, V].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

Recurrence = Callable[..., tuple[Tensor, Tensor]]
NORMALISED = ("q", "k", "erase")


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """What fla's layers pass to a recurrence besides its tensors, by the names that fla has for it."""

    # the factor of the queries; None is K^-0.5
    scale: float | None = None
    # the state to begin with; linear attention has a pair there
    initial_state: Any = None
    # whether the state at the end is given out
    output_final_state: bool = False
    # whether states are [B, G, V, K] outside
    state_v_first: bool = False
    # where N sequences that lie end to end in a batch of one begin and end: [0, 7, 20]
    cu_seqlens: Tensor | None = None
    # whether queries and keys are divided by their lengths
    use_qk_l2norm_in_kernel: bool = False
    # whether the update strength beta comes without its sigmoid
    use_beta_sigmoid_in_kernel: bool = False
    # whether beta goes up to 2 with that sigmoid
    allow_neg_eigval: bool = False
    # whether the decay g is to be made from what is given as g, a rate and a bias
    use_gate_in_kernel: bool = False
    # the logarithm of that rate
    A_log: Tensor | None = None
    # that bias
    dt_bias: Tensor | None = None
    # the strongest decay, where it is bounded: -5.0
    lower_bound: float | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> CallOptions:
        """The options of a call; others say how a kernel works on a GPU, and nothing of what it computes."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in known})

    def strength(self, beta: Tensor) -> Tensor:
        """The strength of an update, where the layer leaves its sigmoid to the kernel."""
        if not self.use_beta_sigmoid_in_kernel:
            return beta
        return wide(beta).sigmoid() * (2 if self.allow_neg_eigval else 1)


class Packing:
    """Sequences end to end [1, total, ...] and the same as a padded batch [N, longest, ...]."""

    def __init__(self, cu_seqlens: Tensor) -> None:
        starts, self.lengths = cu_seqlens[:-1], cu_seqlens.diff()
        steps = torch.arange(int(self.lengths.max()), device=cu_seqlens.device)
        self.inside = steps < self.lengths.unsqueeze(1)
        self.index = torch.where(self.inside, starts.unsqueeze(1) + steps, 0)

    def pad(self, x: Tensor) -> Tensor:
        inside = self.inside.view(*self.inside.shape, *[1] * (x.ndim - 2))
        return torch.where(inside, x[0][self.index], x.new_zeros(()))

    def pack(self, x: Tensor) -> Tensor:
        return x[self.inside].unsqueeze(0)


def wide(x: Tensor) -> Tensor:
    """Half precision in float32, as the kernels compute inside."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def unit(x: Tensor) -> Tensor:
    """Each vector divided by its length, as the kernels do it."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def per_value_head(x: Tensor, v: Tensor) -> Tensor:
    """Queries or keys repeated for the value heads that share them."""
    return x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) if x.shape[2] != v.shape[2] else x


def before_first(k: Tensor, v: Tensor) -> Tensor:
    """The state before the first token."""
    return v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])


def call(recurrence: Recurrence, options: CallOptions, **tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The outputs of a recurrence, and its last state where that is asked for.

    `tensors` are its arguments by token, q, k and v among them; those that are None it is called without.
    """
    inputs = {name: wide(x) for name, x in tensors.items() if x is not None}
    if options.use_qk_l2norm_in_kernel:
        inputs |= {name: unit(inputs[name]) for name in NORMALISED if name in inputs}
    scale = inputs["k"].shape[-1] ** -0.5 if options.scale is None else options.scale
    packing = None if options.cu_seqlens is None else Packing(options.cu_seqlens)
    if packing is not None:
        inputs = {name: packing.pad(x) for name, x in inputs.items()}
    state = options.initial_state
    if state is not None:
        state = (state.mT if options.state_v_first else state).to(inputs["v"])
    o, state = recurrence(**inputs, scale=scale, state=state)
    values = tensors["v"]
    assert values is not None
    o = (o if packing is None else packing.pack(o)).to(values.dtype)
    if not options.output_final_state:
        return o, None
    return o, state.mT.contiguous() if options.state_v_first else state
