"""Gated DeltaNet of flash-linear-attention. The value width is stored as a ratio to the key width: both change."""

from __future__ import annotations

from typing import Any

from slimstate.axes import Mixer, Tap
from slimstate.families import fla_layout
from slimstate.families.contract import Config, Library, corrected_epsilon
from slimstate.families.fla_layout import ratio_for

model_type = "gated_deltanet"
library: Library = "fla"
softmax_layers = fla_layout.softmax_layers
correction = fla_layout.correction
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
    heads = int(known["num_heads"])
    return fla_layout.mixers(
        config,
        layers=int(known["num_hidden_layers"]),
        heads=heads,
        width=int(known["head_dim"]),
        value_heads=heads if known["num_v_heads"] is None else int(known["num_v_heads"]),
        value_dim=_value_dim(config),
        input_size=int(known["hidden_size"]),
        projections="qkvab" + "g" * bool(known["use_gate"]) + "o",
        tap=Tap(
            module="fla.layers.gated_deltanet",
            operators=("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        ),
    )


def resize(config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
    """The config of the same model with `key_dim` channels per head and the value width it had."""
    width, default = int(mixers(config)[0].axis.width), DEFAULTS["norm_eps"]
    norm = corrected_epsilon(correction(config), config, default, width, key_dim) if corrected else {}
    return {**config, "head_dim": key_dim, "expand_v": ratio_for(_value_dim(config), key_dim), **norm}


def _value_dim(config: Config) -> int:
    known = {**DEFAULTS, **config}
    return int(int(known["head_dim"]) * float(known["expand_v"]))
