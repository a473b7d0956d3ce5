"""Gated DeltaNet of flash-linear-attention. The value width is stored as a ratio to the key width: both change."""

from __future__ import annotations

from typing import Any

from slimstate.core.layout import HookPoint, Mixer
from slimstate.families import fla_layout
from slimstate.families.contract import Config, Library
from slimstate.kernels.fla_rules import gated_delta_rule
from slimstate.kernels.patches import Substitute

model_type = "gated_deltanet"
library: Library = "fla"
softmax_layers, correction = fla_layout.softmax_layers, fla_layout.correction
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_heads": 6,
    "num_v_heads": None,
    "head_dim": 256,
    "expand_v": 2.0,
    "num_hidden_layers": 21,
    "use_gate": True,
    "norm_eps": 1e-6,
}


def mixers(config: Config) -> tuple[Mixer, ...]:
    known = {**DEFAULTS, **config}
    return fla_layout.mixers(
        config,
        **fla_layout.sizes_by_head_dim(known),
        projections="qkvab" + "g" * bool(known["use_gate"]) + "o",
        hook=HookPoint(
            module="fla.layers.gated_deltanet",
            operators=("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        ),
        noncommuting=("the activation silu",),
    )


def resize(config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
    """The config of the same model with `key_dim` channels per head and the value width it had."""
    known = {**DEFAULTS, **config}
    return fla_layout.resized_by_head_dim(known, config, key_dim, correction(config) if corrected else None)


SUBSTITUTES = (Substitute("fla.layers.gated_deltanet.fused_recurrent_gated_delta_rule", gated_delta_rule),)
