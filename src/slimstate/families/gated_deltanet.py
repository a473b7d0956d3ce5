"""Gated DeltaNet of flash-linear-attention. The value width is stored as a ratio to the key width: both change."""

from slimstate.core.layout import HookPoint
from slimstate.families.contract import Config, Sizes
from slimstate.families.fla_layout import DEFAULTS, ByHeadDim, Layer


def layer(config: Config, sizes: Sizes) -> Layer:
    return Layer(
        hook=HookPoint(
            module="fla.layers.gated_deltanet", operators=("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
        ),
        projections="qkvab" + "g" * bool(config["use_gate"]) + "o",
        noncommuting=("the activation silu",),
        scalars=("a_proj.weight", "b_proj.weight", "A_log", "dt_bias"),
    )


FAMILIES = (
    ByHeadDim(model_type="gated_deltanet", layer=layer, defaults={**DEFAULTS, "num_v_heads": None, "use_gate": True}),
)
