"""Linear attention of flash-linear-attention, where its feature map treats channels one by one: relu, identity, elu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimstate.core.layout import HookPoint, Mixer
from slimstate.families import fla_layout
from slimstate.families.contract import FOLDED, NORM_EPS, Config, Correction, Library
from slimstate.kernels.fla_rules import rule
from slimstate.kernels.patches import in_place_of

model_type = "linear_attn"
library: Library = "fla"
softmax_layers = fla_layout.softmax_layers
OPERATORS = ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn")
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_heads": 4,
    "num_kv_heads": None,
    "expand_k": 1.0,
    "expand_v": 1.0,
    "num_hidden_layers": 24,
    "feature_map": "elementwise_product",
    "norm_feature_map": False,
    "norm_eps": 1e-6,
}
MIXING = ("hedgehog", "t2r", "elementwise_product", "dpfp")  # feature maps that mix the channels of a head
REFUSED = {
    f"`feature_map` {', '.join(MIXING)} (the default is {DEFAULTS['feature_map']}), `norm_q` or `norm_k`": (
        "channels of a head are mixed"
    )
}
CANCELS = Correction(why="what is read is divided by a sum with the same query scale, so that cutting is zeroing")


def refusal(config: Config) -> str | None:
    known = {**DEFAULTS, **config}
    if known["feature_map"] in MIXING:
        return (
            f"its feature map {known['feature_map']} mixes the channels of a head,"
            " so a channel is not one row of the weights"
        )
    if known.get("norm_q") or known.get("norm_k"):
        return "its norm_q or norm_k divides by the sum over a head's channels, which is not supported"
    return None


def correction(config: Config) -> Correction:
    known = {**DEFAULTS, **config}
    if known["norm_feature_map"]:
        return CANCELS
    return FOLDED if known["feature_map"] in ("relu", "identity") else NORM_EPS


def mixers(config: Config) -> tuple[Mixer, ...]:
    known = {**DEFAULTS, **config}
    sizes = fla_layout.sizes_by_expansion(known)
    copies = sizes["value_heads"] // sizes["heads"]
    return fla_layout.mixers(
        config,
        **sizes,
        projections="qkvo",
        hook=HookPoint(
            module="fla.layers.linear_attn",
            operators=OPERATORS,
            timed=("v",),
            scaled=not known["norm_feature_map"],
        ),
        query=fla_layout.per_group("q_proj.weight", sizes["width"], copies, scaled=correction(config).folded),
        value_rows=sizes["heads"],
        convolved=False,
    )


def resize(config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
    """The config of the same model with `key_dim` channels per head."""
    known = {**DEFAULTS, **config}
    return fla_layout.resized_by_expansion(known, config, key_dim, correction(config) if corrected else None)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Any]:
    """Keys and values are added up and nothing is erased; `normalize` divides by the same sum without the values."""
    state, total = initial_state if normalize and initial_state is not None else (initial_state, None)
    beta = torch.ones_like(q[..., 0])
    options: dict[str, Any] = {"scale": scale, "final": output_final_state, "cu_seqlens": cu_seqlens}
    nothing = torch.zeros_like(k)
    o, state = rule(q, k, v, beta, None, state=state, erase=nothing, **options)
    if not normalize:
        return o, state
    ones = torch.ones_like(v[..., :1])
    before = None if total is None else total.transpose(1, 2).mT
    below, sums = rule(q, k, ones, beta, None, state=before, erase=nothing, **options)
    return o / (below + 1e-10), None if sums is None else (state, sums.mT.transpose(1, 2))


SUBSTITUTES = in_place_of("fla.layers.linear_attn", OPERATORS, linear_attention)
