"""Kimi Delta Attention: the delta rule with a decay for every key channel.

B batch, T time, H key heads, G value heads, K key dim, V value dim. q, k [B, T, H, K]; v [B, T, G, V]; beta [B, T, G];
g [B, T, G, K], the logarithm of the decay; state [B, G, K, V].

    S_t = e^{g_t} S_{t-1} + k_t u_t',   u_t = beta_t (v_t - (e^{g_t} S_{t-1})' k_t),   o_t = scale S_t' q_t
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.kernels.chunk_scan import Inputs, Rule, chunk_scan
from slimstate.kernels.fla_calls import CallOptions, before_first, call, per_value_head, wide
from slimstate.kernels.patches import in_place_of


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, *, scale: float, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token after the other, as the definition says."""
    q, k = per_value_head(q, v), per_value_head(k, v)
    state = before_first(k, v) if state is None else state
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        recalled = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        update = beta[:, t].unsqueeze(-1) * (v[:, t] - recalled)
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * scale)
    return torch.stack(outputs, dim=1), state


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    scale: float,
    state: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same function, C tokens at a time."""
    inputs = Inputs(q=per_value_head(q, v), k=per_value_head(k, v), v=v, g=g, beta=beta)
    return chunk_scan(inputs, state, Rule(scale=scale, chunk=chunk))


def kimi_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """As fla's layers call it."""
    known = CallOptions.read(options)
    form = recurrence if q.shape[1] == 1 else chunked
    return call(form, known, q=q, k=k, v=v, beta=known.strength(beta), g=_decay(g, known))


def _decay(g: Tensor, options: CallOptions) -> Tensor:
    """The logarithm of the decay, where the layer leaves it to the kernel to make."""
    if not options.use_gate_in_kernel:
        return g
    assert options.A_log is not None
    biased = wide(g) if options.dt_bias is None else wide(g) + wide(options.dt_bias).view(g.shape[-2:])
    rate = wide(options.A_log).exp().unsqueeze(-1)
    if options.lower_bound is None:
        return -rate * F.softplus(biased)
    return options.lower_bound * (rate * biased).sigmoid()


PATCHES = in_place_of("fla.layers.kda", ("chunk_kda", "fused_recurrent_kda"), kimi_delta_rule)
