"""Gated DeltaProduct of flash-linear-attention: n keys for every token, with rows by number, head, channel."""

from slimstate.core.layout import HookPoint, Slot
from slimstate.families.contract import Config, Sizes
from slimstate.families.fla_layout import DEFAULTS, ByHeadDim, Layer


def layer(config: Config, sizes: Sizes) -> Layer:
    updates = int(config["num_householder"])
    gates = "a" * bool(config["use_forget_gate"]) + "g" * bool(config["use_output_gate"])
    return Layer(
        hook=HookPoint(
            module="fla.layers.gated_deltaproduct",
            operators=("chunk_gated_delta_product", "fused_recurrent_gated_delta_rule"),
            updates=updates,
        ),
        projections="qkvb" + gates + "o",
        key=Slot(parameter="k_proj.weight", copies=updates, copy_stride=sizes.keys),
        value=Slot(parameter="v_proj.weight", copies=updates, copy_stride=sizes.values),
        convolved_value_heads=sizes.heads * updates,
    )


FAMILIES = (
    ByHeadDim(
        model_type="gated_deltaproduct",
        layer=layer,
        defaults={**DEFAULTS, "num_householder": 1, "use_forget_gate": False, "use_output_gate": True},
    ),
)
