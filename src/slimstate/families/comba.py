"""Comba of flash-linear-attention: a gated delta rule that erases by a vector p, the key scaled by channel."""

from slimstate.core.layout import HookPoint
from slimstate.families.contract import Config, Sizes
from slimstate.families.fla_layout import DEFAULTS, ByHeadDim, Layer


def layer(config: Config, sizes: Sizes) -> Layer:
    return Layer(
        hook=HookPoint(module="fla.layers.comba", operators=("chunk_comba", "fused_recurrent_comba"), key_like=("p",)),
        projections="qkvab" + "g" * bool(config["use_output_gate"]) + "o",
    )


FAMILIES = (
    ByHeadDim(model_type="comba", layer=layer, defaults={**DEFAULTS, "num_v_heads": None, "use_output_gate": True}),
)
