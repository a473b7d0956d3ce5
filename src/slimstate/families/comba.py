"""Comba of flash-linear-attention: a gated delta rule that erases by a vector p made of the key, channel by channel."""

from __future__ import annotations

from slimstate.core.layout import HookPoint
from slimstate.families.contract import Config, Sizes
from slimstate.families.fla_layout import ByHeadDim, Layer


def layer(known: Config, sizes: Sizes) -> Layer:
    return Layer(
        hook=HookPoint(module="fla.layers.comba", operators=("chunk_comba", "fused_recurrent_comba"), key_like=("p",)),
        projections="qkvab" + "g" * bool(known["use_output_gate"]) + "o",
    )


FAMILIES = (
    ByHeadDim(
        model_type="comba",
        layer=layer,
        defaults={
            "hidden_size": 2048,
            "num_heads": 6,
            "num_v_heads": None,
            "head_dim": 256,
            "expand_v": 2.0,
            "num_hidden_layers": 21,
            "use_output_gate": True,
            "norm_eps": 1e-6,
        },
    ),
)
