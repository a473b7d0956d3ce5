"""DeltaNet of flash-linear-attention. The config stores the key width as a ratio to the hidden size."""

from slimstate.core.layout import HookPoint
from slimstate.families.contract import Config, Sizes
from slimstate.families.fla_layout import ByExpansion, Layer


def layer(config: Config, sizes: Sizes) -> Layer:
    return Layer(
        hook=HookPoint(
            module="fla.layers.delta_net",
            operators=("chunk_delta_rule", "fused_recurrent_delta_rule"),
            normaliser="sum_norm" if config["qk_norm"] == "sum" else None,
        ),
        projections="qkv" + "b" * bool(config["use_beta"]) + "g" * bool(config["use_gate"]) + "o",
        noncommuting=_noncommuting(config["qk_activation"], config["qk_norm"]),
        scalars=("b_proj.weight",) * bool(config["use_beta"]),
    )


def _noncommuting(activation: str, norm: str) -> tuple[str, ...]:
    """Return what does not commute with a rotation: a length is the same in every basis, a sum of channels is not."""
    activations = () if activation == "identity" else (f"the activation {activation}",)
    return activations if norm == "l2" else (*activations, f"the norm {norm}")


FAMILIES = (
    ByExpansion(
        model_type="delta_net",
        layer=layer,
        defaults={
            "hidden_size": 2048, "num_heads": 16, "expand_k": 1.0, "expand_v": 1.0, "num_hidden_layers": 24,
            "qk_activation": "silu", "qk_norm": "l2", "use_beta": True, "use_gate": False, "norm_eps": 1e-6,
        },
    ),
)  # fmt: skip
