"""Gated linear attention: keys and values are added up under a decay, and nothing is erased.

B batch, T time, H key heads, G value heads, K key dim, V value dim. q, k [B, T, H, K]; v [B, T, G, V]; g, the logarithm
of the decay, is [B, T, G, K] for every channel, [B, T, G] for a whole head, or None; state [B, G, K, V].

    S_t = e^{g_t} S_{t-1} + k_t v_t',   o_t = scale S_t' q_t
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimstate.kernels.chunk_scan import Inputs, Rule, chunk_scan
from slimstate.kernels.fla_calls import CallOptions, before_first, call, fade, per_value_head
from slimstate.kernels.patches import in_place_of


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, scale: float = 1.0, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute one token after the other, as in the definition."""
    q, k = per_value_head(q, v), per_value_head(k, v)
    state = before_first(k, v) if state is None else state
    outputs = []
    for t in range(q.shape[1]):
        state = fade(state, g, t) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * scale)
    return torch.stack(outputs, dim=1), state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None,
    *, scale: float = 1.0, state: Tensor | None = None, chunk: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the same function C tokens at a time."""
    inputs = Inputs(q=per_value_head(q, v), k=per_value_head(k, v), v=v, g=g)
    return chunk_scan(inputs, state, Rule(scale=scale, chunk=chunk))


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute it as fla's layers call it; some functions of fla call the decay g, others gk."""
    form = recurrence if q.shape[1] == 1 else chunked
    return call(form, CallOptions.read(options), q=q, k=k, v=v, g=gk if g is None else g)


PATCHES = in_place_of("fla.layers.gla", ("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"), gated_linear_attention)
