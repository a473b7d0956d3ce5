"""RWKV-6 of flash-linear-attention: r is the query, every key channel has a decay w and a bonus u for the newest token.

    o_t = r_t' (S_{t-1} + (u k_t) v_t'),   S_t = e^{w_t} S_{t-1} + k_t v_t'

Queries are not scaled, and channels never meet before the state is read: zero is what a dropped one adds. Projections
see a mixture of a token and the one before it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.core.layout import HookPoint, Mixer, Slot
from slimstate.families import fla_layout
from slimstate.families.contract import Config, Correction, Library
from slimstate.kernels.fla_rules import Packing, wide
from slimstate.kernels.patches import Substitute, in_place_of

model_type = "rwkv6"
library: Library = "fla"
softmax_layers = fla_layout.softmax_layers
OPERATORS = ("chunk_rwkv6", "fused_recurrent_rwkv6")
UNSCALED = Correction(why="these layers do not scale queries, whatever the key dim: cutting is zeroing")
DECAY = "w_proj.linear.lora.2"
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_heads": 4,
    "expand_k": 0.5,
    "expand_v": 1.0,
    "num_hidden_layers": 24,
}


def correction(config: Config) -> Correction:
    return UNSCALED


def mixers(config: Config) -> tuple[Mixer, ...]:
    sizes = fla_layout.sizes_by_expansion({**DEFAULTS, **config, "num_kv_heads": None})
    maps = (f"{letter}_proj.linear" for letter in "rkvg")
    return fla_layout.mixers(
        config,
        **sizes,
        # the second map of x_proj is missing: the layer reads its weight past an adapter
        projections=(*maps, "w_proj.linear.lora.0", DECAY, "x_proj.0.linear", "o"),
        hook=HookPoint(module="fla.layers.rwkv6", operators=OPERATORS, query="r", timed=("v", "w"), scaled=False),
        query=Slot(parameter="r_proj.linear.weight"),
        key=Slot(parameter="k_proj.linear.weight"),
        gates=(
            Slot(parameter=f"{DECAY}.weight"),
            Slot(parameter=f"{DECAY}.bias"),
            Slot(parameter="bonus", by_head=True),
        ),
        convolved=False,
    )


def resize(config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
    """The config of the same model with `key_dim` channels per head."""
    return fla_layout.resized_by_expansion({**DEFAULTS, **config}, config, key_dim, None)


def rwkv6_rule(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """One token after the other; r, k, w [B, T, H, K], v [B, T, H, V], u [H, K], states [B, H, K, V]."""
    dtype = v.dtype
    packing = None if cu_seqlens is None else Packing(cu_seqlens)
    r, k, v, w = (wide(x if packing is None else packing.pad(x)) for x in (r, k, v, w))
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if initial_state is None else initial_state
    state, decay, outputs = state.to(v), w.exp().unsqueeze(-1), []
    for t in range(r.shape[1]):
        outputs.append(torch.einsum("bhk,bhkv->bhv", r[:, t], state))
        state = decay[:, t] * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
    newest = (r * wide(u) * k).sum(-1, keepdim=True) * v
    o = (torch.stack(outputs, dim=1) + newest) * (k.shape[-1] ** -0.5 if scale is None else scale)
    return (o if packing is None else packing.pack(o)).to(dtype), state if output_final_state else None


def token_shift(x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """What the token before has more than a token [B, T, D]; before the first one stands a zero."""
    packing = None if cu_seqlens is None else Packing(cu_seqlens)
    inputs = x if packing is None else packing.pad(x)
    delta = F.pad(inputs, (0, 0, 1, 0))[:, :-1] - inputs
    return delta if packing is None else packing.pack(delta)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """The norm of each group of channels; of one group it is a layer norm."""
    total = wide(x) if residual is None else wide(x) + residual
    groups = total.unflatten(-1, (num_groups, -1))
    norm = F.rms_norm if is_rms_norm else F.layer_norm
    y = norm(groups, groups.shape[-1:], eps=eps).flatten(-2)
    y = y if weight is None else y * weight
    y = (y if bias is None else y + bias).to(x.dtype)
    return (y, total if residual_in_fp32 else total.to(x.dtype)) if prenorm else y


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def squared_relu_backward(g: Tensor, x: Tensor) -> Tensor:
    return 2 * g * F.relu(x)


SUBSTITUTES = (
    *in_place_of("fla.layers.rwkv6", OPERATORS, rwkv6_rule),
    Substitute("fla.layers.rwkv6.token_shift", token_shift),
    Substitute("fla.models.rwkv6.modeling_rwkv6.token_shift", token_shift),
    *in_place_of("fla.modules.norm.layernorm", ("layer_norm", "group_norm"), group_norm),
    Substitute("fla.modules.activations.ops.sqrelu_fwd", squared_relu),
    Substitute("fla.modules.activations.ops.sqrelu_bwd", squared_relu_backward),
)
