"""Linear attention: keys and values are added up, and nothing decays or is erased.

    S_t = S_{t-1} + k_t v_t',   o_t = scale S_t' q_t

Token by token it is gated linear attention whose decays are none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slimstate.kernels import gla
from slimstate.kernels.chunk_scan import Inputs, Rule, chunk_scan
from slimstate.kernels.fla_calls import CallOptions, call, per_value_head
from slimstate.kernels.patches import in_place_of


def recurrence(q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token after the other."""
    return gla.recurrence(q, k, v, torch.zeros_like(per_value_head(k, v)), scale=scale, state=state)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: Tensor | None = None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """The same function, C tokens at a time."""
    inputs = Inputs(q=per_value_head(q, v), k=per_value_head(k, v), v=v)
    return chunk_scan(inputs, state, Rule(scale=scale, chunk=chunk))


def linear_attention(q: Tensor, k: Tensor, v: Tensor, *, normalize: bool = True, **options: Any) -> tuple[Tensor, Any]:
    """As fla's layers call it; `normalize` divides by the same sum without the values, and then states are pairs."""
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
