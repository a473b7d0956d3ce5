"""Mamba-2: gated linear attention with one decay per head, e^{A dt}, and inputs scaled by dt.

B batch, T time, H heads, G groups of them, P head dim, N state size. x [B, T, H, P]; dt [B, T, H]; A, D [H]; the keys
B and queries C [B, T, G, N]; state [B, H, P, N].

    S_t = e^{A dt_t} S_{t-1} + dt_t x_t B_t',   y_t = S_t C_t + D x_t
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.kernels.fla_calls import wide
from slimstate.kernels.gla import chunked, recurrence


def state_space_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute it as the layers of transformers call it; their `chunk_size` is for GPUs."""
    x, bias, first = wide(hidden_states), options.get("dt_bias"), options.get("initial_states")
    step = dt if bias is None else dt + bias.to(dt.dtype)
    step = F.softplus(step) if options.get("dt_softplus") else step
    step = wide(torch.clamp(step, *options.get("dt_limit", (0.0, None))))
    state = None if first is None else first.to(x).mT
    form = recurrence if x.shape[1] == 1 else chunked
    y, last = form(wide(C), wide(B), x * step.unsqueeze(-1), A.to(x) * step, state=state)
    y = y if D is None else torch.addcmul(y, D.unsqueeze(-1).to(y), x)
    return (y, last.mT.contiguous()) if options.get("return_final_states") else y


IN_TRANSFORMERS = {"mamba2_chunk_scan": state_space_scan}
