"""Call a recurrence as the layers of fla do: with packed sequences, norms inside, and half precision outside.

A recurrence is a function of tensors by token, a `scale` and a `state`, which returns outputs and the last state.
`call` turns the arguments of fla's layers into its own; each module of a recurrence has functions for these layers.
B batch, T time, H key heads, G value heads, K key dim, V value dim; states [B, G, K, V].
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from slimstate.system.value import Value

Recurrence = Callable[..., tuple[Tensor, Tensor]]
Result = tuple[Tensor, Tensor | None]  # the outputs, and the last state where it is to be returned
NORMALISED = ("q", "k", "erase")  # inputs that may be divided by their lengths


class CallOptions(Value):
    """The options that fla's layers pass to a recurrence, under the names that fla has for them."""

    scale: float | None = None  # the factor of the queries; None is K^-0.5
    initial_state: Any = None  # the state to start from; a pair for linear attention
    output_final_state: bool = False  # whether the last state is returned
    state_v_first: bool = False  # whether states are passed as [B, G, V, K]
    cu_seqlens: Tensor | None = None  # where N sequences, end to end in a batch of one, start and end: [0, 7, 20]
    use_qk_l2norm_in_kernel: bool = False  # whether queries and keys are divided by their lengths
    use_beta_sigmoid_in_kernel: bool = False  # whether the sigmoid of the update strength beta is still to be applied
    allow_neg_eigval: bool = False  # whether beta is up to 2 with that sigmoid
    use_gate_in_kernel: bool = False  # whether the decay is to be computed from g, a rate and a bias
    A_log: Tensor | None = None  # the logarithm of the rate of the decay
    dt_bias: Tensor | None = None  # the bias of the decay
    lower_bound: float | None = None  # the strongest decay, if it is bounded: -5.0

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> "CallOptions":
        """Return the options of a call that say what to compute, without those of the kernel on a GPU."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in names})

    def strength(self, beta: Tensor) -> Tensor:
        """Return the strength of an update, whose sigmoid some layers leave to the kernel."""
        if not self.use_beta_sigmoid_in_kernel:
            return beta
        return wide(beta).sigmoid() * (2 if self.allow_neg_eigval else 1)


class Packing:
    """Convert sequences packed end to end [1, total, ...] to a padded batch [N, longest, ...] and back."""

    def __init__(self, cu_seqlens: Tensor | None) -> None:
        self.inside: Tensor | None = None  # nothing is packed
        if cu_seqlens is not None:
            starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
            steps = torch.arange(int(lengths.max()), device=cu_seqlens.device)
            self.inside = steps < lengths.unsqueeze(1)
            self.index = torch.where(self.inside, starts.unsqueeze(1) + steps, 0)

    def pad(self, x: Tensor) -> Tensor:
        if self.inside is None:
            return x
        inside = self.inside.view(*self.inside.shape, *[1] * (x.ndim - 2))
        return torch.where(inside, x[0][self.index], x.new_zeros(()))

    def pack(self, x: Tensor) -> Tensor:
        return x if self.inside is None else x[self.inside].unsqueeze(0)


def wide(x: Tensor) -> Tensor:
    """Return half precision as float32, in which the kernels compute."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def unit(x: Tensor) -> Tensor:
    """Divide each vector by its length, as the kernels do."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def per_value_head(x: Tensor, v: Tensor) -> Tensor:
    """Repeat queries or keys for the value heads that share them."""
    return x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) if x.shape[2] != v.shape[2] else x


def apply_decay(state: Tensor, g: Tensor | None, t: int) -> Tensor:
    """Return the state [B, G, K, V] after the decay of token t; g is [B, T, G], [B, T, G, K] or None."""
    return state if g is None else state * g[:, t].exp().view(*state.shape[:2], -1, 1)


def call(recurrence: Recurrence, options: CallOptions, **tensors: Tensor | None) -> Result:
    """Return the outputs of a recurrence, and its last state if the options say so.

    `tensors` are its arguments by token, among them q, k and v; those that are None are left out.
    """
    inputs = {name: wide(x) for name, x in tensors.items() if x is not None}
    if options.use_qk_l2norm_in_kernel:
        inputs |= {name: unit(inputs[name]) for name in NORMALISED if name in inputs}
    scale = inputs["k"].shape[-1] ** -0.5 if options.scale is None else options.scale
    packing = Packing(options.cu_seqlens)
    inputs = {name: packing.pad(x) for name, x in inputs.items()}
    state = options.initial_state
    if state is not None:
        state = (state.mT if options.state_v_first else state).to(inputs["v"])
    o, state = recurrence(**inputs, scale=scale, state=state)
    values = tensors["v"]
    assert values is not None
    o = packing.pack(o).to(values.dtype)
    if not options.output_final_state:
        return o, None
    return o, state.mT.contiguous() if options.state_v_first else state
