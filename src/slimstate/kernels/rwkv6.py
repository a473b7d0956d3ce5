"""RWKV-6: every key channel has a decay w and a bonus u for the newest token.

B batch, T time, H heads, K key dim, V value dim. r (the query), k, w [B, T, H, K]; v [B, T, H, V]; u [H, K]; state
[B, H, K, V].

    o_t = scale r_t' (S_{t-1} + (u k_t) v_t'),   S_t = e^{w_t} S_{t-1} + k_t v_t'
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.kernels.chunk_scan import Inputs, Rule, chunk_scan, zero_state
from slimstate.kernels.fla_calls import CallOptions, Packing, Result, call, wide
from slimstate.kernels.patches import Patch, in_place_of


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, *, bonus: Tensor, scale: float, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state, one token after the other as in the definition; q is r, `bonus` is u."""
    state = zero_state(k, v) if state is None else state
    decay, outputs = w.exp().unsqueeze(-1), []
    for t in range(q.shape[1]):
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        state = decay[:, t] * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
    newest = (q * bonus * k).sum(-1, keepdim=True) * v
    return (torch.stack(outputs, dim=1) + newest) * scale, state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, *, bonus: Tensor, state: Tensor | None = None, **rule: Any
) -> tuple[Tensor, Tensor]:
    """Return the same, computed C tokens at a time; queries read the state before their token, and the bonus."""
    return chunk_scan(Inputs(q=q, k=k, v=v, g=w, bonus=bonus, state=state), Rule(late=False, **rule))


def rwkv6_rule(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, **options: Any) -> Result:
    """Compute RWKV-6 as fla's layers call it."""
    form = recurrence if r.shape[1] == 1 else chunked
    return call(partial(form, bonus=wide(u)), CallOptions.read(options), q=r, k=k, v=v, w=w)


def token_shift(x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the difference of each token [B, T, D] to the one before it; before the first there is a zero."""
    packing = Packing(cu_seqlens)
    inputs = packing.pad(x)
    return packing.pack(F.pad(inputs, (0, 0, 1, 0))[:, :-1] - inputs)


PATCHES = (
    *in_place_of("fla.layers.rwkv6", ("chunk_rwkv6", "fused_recurrent_rwkv6"), rwkv6_rule),
    Patch("fla.layers.rwkv6.token_shift", token_shift),
    Patch("fla.models.rwkv6.modeling_rwkv6.token_shift", token_shift),
)
