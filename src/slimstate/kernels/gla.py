"""Gated linear attention, linear attention without a decay, and retention with a fixed one.

B batch, T time, H key heads, G value heads, K key dim, V value dim. q, k [B, T, H, K]; v [B, T, G, V]; g, the logarithm
of the decay, is [B, T, G, K] for every channel, [B, T, G] for a whole head, or None; state [B, G, K, V].

    S_t = e^{g_t} S_{t-1} + k_t v_t',   o_t = scale S_t' q_t

Keys and values are added up under the decay, and nothing is erased.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slimstate.kernels.chunk_scan import Inputs, Rule, chunk_scan, zero_state
from slimstate.kernels.fla_calls import CallOptions, Result, apply_decay, call, per_value_head
from slimstate.kernels.patches import in_place_of


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, scale: float = 1.0, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state, computed one token after the other as in the definition."""
    q, k = per_value_head(q, v), per_value_head(k, v)
    state = zero_state(k, v) if state is None else state
    outputs = []
    for t in range(q.shape[1]):
        state = apply_decay(state, g, t) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * scale)
    return torch.stack(outputs, dim=1), state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, state: Tensor | None = None, **rule: Any
) -> tuple[Tensor, Tensor]:
    """Return the same, computed C tokens at a time."""
    return chunk_scan(Inputs(q=per_value_head(q, v), k=per_value_head(k, v), v=v, g=g, state=state), Rule(**rule))


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, **options: Any
) -> Result:
    """Compute gated linear attention as fla's layers call it; some functions of fla name the decay g, others gk."""
    form = recurrence if q.shape[1] == 1 else chunked
    return call(form, CallOptions.read(options), q=q, k=k, v=v, g=gk if g is None else g)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, *, normalize: bool = True, **options: Any) -> tuple[Tensor, Any]:
    """Compute linear attention as fla's layers call it; with `normalize`, a weighted mean, whose state is a pair."""
    settings = CallOptions.read(options)
    if not normalize:
        return call(chunked, settings, q=q, k=k, v=v)
    values, keys = (None, None) if settings.initial_state is None else settings.initial_state
    before = None if keys is None else keys.transpose(1, 2).mT
    o, state = call(chunked, replace(settings, initial_state=values), q=q, k=k, v=v)
    below, sums = call(chunked, replace(settings, initial_state=before), q=q, k=k, v=torch.ones_like(v[..., :1]))
    return o / (below + 1e-10), None if sums is None else (state, sums.mT.transpose(1, 2))


def retention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    """Compute retention as fla's layers call it: with the decay 1 - 2^(-5 - h) of head h."""
    decay = (1 - 2.0 ** (-5.0 - torch.arange(q.shape[2], dtype=torch.float, device=q.device))).log()
    return gated_linear_attention(q, k, v, g=decay.expand(q.shape[:3]), **options)


LINEAR = ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn")
RETENTION = ("chunk_retention", "fused_chunk_retention", "parallel_retention", "fused_recurrent_retention")
PATCHES = (
    *in_place_of("fla.layers.gla", ("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"), gated_linear_attention),
    *in_place_of("fla.layers.linear_attn", LINEAR, linear_attention),
    *in_place_of("fla.layers.multiscale_retention", RETENTION, retention),
)
