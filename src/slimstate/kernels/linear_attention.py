"""Linear attention: gated linear attention without a decay.

S_t = S_{t-1} + k_t v_t',   o_t = scale S_t' q_t
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slimstate.kernels.fla_calls import CallOptions, call
from slimstate.kernels.gla import chunked
from slimstate.kernels.patches import in_place_of


def linear_attention(q: Tensor, k: Tensor, v: Tensor, *, normalize: bool = True, **options: Any) -> tuple[Tensor, Any]:
    """Compute it as fla's layers call it; `normalize` divides by the sum without the values, and states are pairs."""
    known = CallOptions.read(options)
    if not normalize:
        return call(chunked, known, q=q, k=k, v=v)
    values, keys = (None, None) if known.initial_state is None else known.initial_state
    before = None if keys is None else keys.transpose(1, 2).mT
    o, state = call(chunked, replace(known, initial_state=values), q=q, k=k, v=v)
    below, sums = call(chunked, replace(known, initial_state=before), q=q, k=k, v=torch.ones_like(v[..., :1]))
    return o / (below + 1e-10), None if sums is None else (state, sums.mT.transpose(1, 2))


PATCHES = in_place_of(
    "fla.layers.linear_attn",
    ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"),
    linear_attention,
)
