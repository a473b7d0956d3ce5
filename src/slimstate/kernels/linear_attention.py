"""Linear attention: keys and values are added up, and nothing decays or is erased.

    S_t = S_{t-1} + k_t v_t',   o_t = scale S_t' q_t

That is the delta rule that looks up what to erase by zero and updates with strength 1, so its two forms are those of
`delta_rule`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slimstate.kernels.delta_rule import delta_rule
from slimstate.kernels.fla_calls import CallOptions, call
from slimstate.kernels.patches import in_place_of


def added_up(q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return delta_rule(q, k, v, torch.ones_like(v[..., 0]), scale=scale, state=state, erase=torch.zeros_like(k))


def linear_attention(q: Tensor, k: Tensor, v: Tensor, *, normalize: bool = True, **options: Any) -> tuple[Tensor, Any]:
    """As fla's layers call it; `normalize` divides by the same sum without the values, and then states are pairs."""
    known = CallOptions.read(options)
    if not normalize:
        return call(added_up, known, q=q, k=k, v=v)
    values, keys = (None, None) if known.initial_state is None else known.initial_state
    before = None if keys is None else keys.transpose(1, 2).mT
    o, state = call(added_up, replace(known, initial_state=values), q=q, k=k, v=v)
    below, sums = call(added_up, replace(known, initial_state=before), q=q, k=k, v=torch.ones_like(v[..., :1]))
    return o / (below + 1e-10), None if sums is None else (state, sums.mT.transpose(1, 2))


PATCHES = in_place_of(
    "fla.layers.linear_attn",
    ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"),
    linear_attention,
)
