"""Mamba-2: linear attention with one decay for a head, e^{A dt}, and inputs of the strength dt.

B batch, T time, H heads, G groups of them, P head dim, N state size. x [B, T, H, P]; dt [B, T, H]; A, D [H]; the keys
B and queries C [B, T, G, N]; state [B, H, P, N].

    S_t = e^{A dt_t} S_{t-1} + dt_t x_t B_t',   y_t = S_t C_t + D x_t
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.kernels import gla
from slimstate.kernels.chunk_scan import Inputs, Rule, chunk_scan
from slimstate.kernels.fla_calls import per_value_head, wide


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float = 1.0, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token after the other: gated linear attention whose channels decay alike; q is C, k is B and v is dt x."""
    return gla.recurrence(q, k, v, g.unsqueeze(-1).expand(*g.shape, k.shape[-1]), scale=scale, state=state)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same function, C tokens at a time."""
    inputs = Inputs(q=per_value_head(q, v), k=per_value_head(k, v), v=v, g=g)
    return chunk_scan(inputs, state, Rule(scale=scale, chunk=chunk))


def state_space_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """As the layers of transformers call it; their `chunk_size` is for GPUs."""
    x = wide(hidden_states)
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = F.softplus(step) if options.get("dt_softplus") else step
    step = wide(torch.clamp(step, *options.get("dt_limit", (0.0, None))))
    state = None if initial_states is None else initial_states.to(x).mT
    form = recurrence if x.shape[1] == 1 else chunked
    y, last = form(wide(C), wide(B), x * step.unsqueeze(-1), A.to(x) * step, state=state)
    y = y if D is None else torch.addcmul(y, D.unsqueeze(-1).to(y), x)
    return (y, last.mT.contiguous()) if options.get("return_final_states") else y


IN_TRANSFORMERS = {"mamba2_chunk_scan": state_space_scan}
