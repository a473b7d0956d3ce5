"""Kimi Delta Attention of flash-linear-attention: Gated DeltaNet with a decay for every key channel and value head."""

from __future__ import annotations

from typing import Any

from slimstate.axes import Mixer, Tap
from slimstate.families import fla_layout
from slimstate.families.contract import Config, Library

model_type = "kda"
library: Library = "fla"
softmax_layers, correction = fla_layout.softmax_layers, fla_layout.correction
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_heads": 16,
    "num_v_heads": None,
    "head_dim": 128,
    "expand_v": 1.0,
    "num_hidden_layers": 24,
    "norm_eps": 1e-6,
}


def mixers(config: Config) -> tuple[Mixer, ...]:
    known = {**DEFAULTS, **config}
    sizes = fla_layout.sizes_by_head_dim(known)
    copies = max(1, sizes["value_heads"] // sizes["heads"])
    return fla_layout.mixers(
        config,
        **sizes,
        projections=("q", "k", "v", "b", "f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1", "o"),
        tap=Tap(module="fla.layers.kda", operators=("chunk_kda", "fused_recurrent_kda")),
        gates=tuple(fla_layout.per_group(name, sizes["width"], copies) for name in ("f_proj.1.weight", "dt_bias")),
    )


def resize(config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
    """The config of the same model with `key_dim` channels per head and the value width it had."""
    known = {**DEFAULTS, **config}
    return fla_layout.resized_by_head_dim(known, config, key_dim, correction(config) if corrected else None)
