"""Gated linear attention and RetNet of flash-linear-attention: no delta rule, a decay for every key channel or head.

Without a convolution only linear maps lie before the state, so the query scale is folded into the query weights. Query
heads that share a key head share its channels. RetNet rotates queries and keys by frequencies that depend on the key
dim, so only its values can be cut.
"""

from slimstate.core.layout import HookPoint, Slot
from slimstate.families.contract import FOLDED, NORM_EPS, Config, Sizes
from slimstate.families.fla_layout import ByExpansion, Layer, grouped_queries


def gated_layer(config: Config, sizes: Sizes) -> Layer:
    homogeneous = not config["use_short_conv"] and config["feature_map"] in (None, "relu")
    correction = FOLDED if homogeneous else NORM_EPS
    fused = config["use_output_gate"] and config["fuse_norm"] and config["hidden_act"] == "swish"
    return Layer(
        hook=HookPoint(
            module="fla.layers.gla",
            operators=("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"),
            per_token=("v", "g", "gk"),
        ),
        projections=("q", "k", "v", *"g" * bool(config["use_output_gate"]), "gk_proj.0", "gk_proj.1", "o"),
        query=grouped_queries(sizes, correction),
        gates=(Slot(parameter="gk_proj.1.weight"), Slot(parameter="gk_proj.1.bias")),
        convolved_value_heads=sizes.heads,
        value_norm="g_norm_swish_gate" if fused else "g_norm",
        distinct_value_heads=sizes.heads,
        linear_values=not config["use_short_conv"],
        correction=correction,
    )


def retention_layer(config: Config, sizes: Sizes) -> Layer:
    gated = bool(config["use_output_gate"])
    return Layer(
        hook=HookPoint(
            module="fla.layers.multiscale_retention",
            operators=("chunk_retention", "fused_chunk_retention", "fused_recurrent_retention"),
            per_token=("v",),
        ),
        projections="qkv" + "g" * gated + "o",
        query=grouped_queries(sizes, NORM_EPS),
        convolved=False,
        value_norm="g_norm_swish_gate" if gated and config["fuse_norm"] else "g_norm",
        distinct_value_heads=sizes.heads,
        linear_values=True,
    )


FAMILIES = (
    ByExpansion(
        model_type="gla",
        layer=gated_layer,
        defaults={
            "hidden_size": 2048, "num_heads": 4, "num_kv_heads": None, "expand_k": 0.5, "expand_v": 1.0,
            "num_hidden_layers": 24, "use_short_conv": False, "use_output_gate": True, "feature_map": None,
            "norm_eps": 1e-6, "fuse_norm": True, "hidden_act": "swish",
        },
    ),
    ByExpansion(
        model_type="retnet",
        layer=retention_layer,
        fixed_keys="it rotates keys and queries by frequencies that depend on the key dim",
        defaults={
            "hidden_size": 2048, "num_heads": 8, "num_kv_heads": None, "expand_k": 1.0, "expand_v": 2.0,
            "num_hidden_layers": 24, "use_output_gate": True, "norm_eps": 1e-6, "fuse_norm": True,
        },
    ),
)  # fmt: skip
