"""How fla's layers write to and read from their state, in PyTorch: what their families have in common.

The chunked delta rule does most of them; a decay of its own for every key channel (KDA, GLA) is done one token after
the other. A family has the functions that its layers call, with their arguments, and tells `rule` what these mean.
B batch, T time, H key heads, G value heads, K key dim, V value dim; states [B, G, K, V].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.kernels.delta_rule import channel_decay, delta_rule


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


def rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    *,
    scale: float | None,
    state: Tensor | None,
    final: bool,
    cu_seqlens: Tensor | None,
    normalise: bool = False,
    erase: Tensor | None = None,
    value_first: bool = False,
    by_channel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A rule as fla's layers call it: packed sequences, L2 norm inside, half precision outside.

    The state is given out where it is `final`, and is [B, G, V, K] outside with `value_first`. `by_channel` takes a
    decay of every key channel.
    """
    dtype = v.dtype
    q, k, v = (wide(x) for x in (q, k, v))
    beta, g, erase = (None if x is None else wide(x) for x in (beta, g, erase))
    if normalise:
        q, k = unit(q), unit(k)
        erase = None if erase is None else unit(erase)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    packing = None if cu_seqlens is None else Packing(cu_seqlens)
    if packing is not None:
        q, k, v = (packing.pad(x) for x in (q, k, v))
        beta, g, erase = (None if x is None else packing.pad(x) for x in (beta, g, erase))
    if state is not None:
        state = (state.mT if value_first else state).to(v)
    if by_channel:
        assert g is not None
        o, state = channel_decay(q, k, v, g, beta, scale=scale, state=state)
    else:
        assert beta is not None
        o, state = delta_rule(q, k, v, beta, g, erase=erase, scale=scale, state=state)
    o = (o if packing is None else packing.pack(o)).to(dtype)
    return o, (state.mT.contiguous() if value_first else state) if final else None


def opened(beta: Tensor, in_kernel: bool, allow_neg_eigval: bool) -> Tensor:
    """The strength of an update, where the layer leaves its sigmoid to the kernel."""
    return wide(beta).sigmoid() * (2 if allow_neg_eigval else 1) if in_kernel else beta


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    if use_gate_in_kernel:
        assert g is not None
        assert A_log is not None
        g = -wide(A_log).exp() * F.softplus(wide(g) if dt_bias is None else wide(g) + wide(dt_bias))
    return rule(
        q,
        k,
        v,
        opened(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        g,
        scale=scale,
        state=initial_state,
        final=output_final_state,
        cu_seqlens=cu_seqlens,
        normalise=use_qk_l2norm_in_kernel,
        value_first=state_v_first,
    )
