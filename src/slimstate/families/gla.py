"""Gated linear attention of flash-linear-attention: no delta rule, a decay for every key channel.

Without convolution only linear maps lie before the state, so the query scale is folded into the query weights. Where
several query heads share a key head they share its channels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slimstate.core.layout import HookPoint, Mixer, Slot
from slimstate.families import fla_layout
from slimstate.families.contract import FOLDED, NORM_EPS, Config, Correction, Library
from slimstate.kernels.fla_rules import rule
from slimstate.kernels.patches import in_place_of

model_type = "gla"
library: Library = "fla"
softmax_layers = fla_layout.softmax_layers
OPERATORS = ("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla")
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_heads": 4,
    "num_kv_heads": None,
    "expand_k": 0.5,
    "expand_v": 1.0,
    "num_hidden_layers": 24,
    "use_short_conv": False,
    "use_output_gate": True,
    "feature_map": None,
    "norm_eps": 1e-6,
}


def correction(config: Config) -> Correction:
    known = {**DEFAULTS, **config}
    homogeneous = not known["use_short_conv"] and known["feature_map"] in (None, "relu")
    return FOLDED if homogeneous else NORM_EPS


def mixers(config: Config) -> tuple[Mixer, ...]:
    known = {**DEFAULTS, **config}
    sizes = fla_layout.sizes_by_expansion(known)
    copies = sizes["value_heads"] // sizes["heads"]
    return fla_layout.mixers(
        config,
        **sizes,
        projections=("q", "k", "v", *"g" * bool(known["use_output_gate"]), "gk_proj.0", "gk_proj.1", "o"),
        hook=HookPoint(
            module="fla.layers.gla",
            operators=OPERATORS,
            timed=("v", "g", "gk"),
        ),
        query=fla_layout.per_group("q_proj.weight", sizes["width"], copies, scaled=correction(config).folded),
        gates=(Slot(parameter="gk_proj.1.weight"), Slot(parameter="gk_proj.1.bias")),
        value_rows=sizes["heads"],
        convolved=bool(known["use_short_conv"]),
    )


def resize(config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
    """The config of the same model with `key_dim` channels per head."""
    known = {**DEFAULTS, **config}
    return fla_layout.resized_by_expansion(known, config, key_dim, correction(config) if corrected else None)


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    decay = gk if g is None else g
    assert decay is not None
    return rule(
        q,
        k,
        v,
        None,
        decay,
        scale=scale,
        state=initial_state,
        final=output_final_state,
        cu_seqlens=cu_seqlens,
        value_first=state_v_first,
        by_channel=True,
    )


SUBSTITUTES = in_place_of("fla.layers.gla", OPERATORS, gated_linear_attention)
