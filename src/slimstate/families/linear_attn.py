"""Linear attention of flash-linear-attention: keys can be cut if its feature map is elementwise, values always."""

from slimstate.core.layout import HookPoint
from slimstate.families.contract import FOLDED, NORM_EPS, Config, Correction, Sizes
from slimstate.families.fla_layout import ByExpansion, Layer, grouped_queries

# feature maps that mix the channels of a head, and how many features they make of each
MIXING = {"hedgehog": 2, "t2r": 1, "elementwise_product": 1, "dpfp": 8}
DEFAULT = "elementwise_product"
CANCELS = Correction(why="the output is divided by a sum with the same query scale, so that cutting equals zeroing")


def layer(config: Config, sizes: Sizes) -> Layer:
    correction = FOLDED if config["feature_map"] in ("relu", "identity") else NORM_EPS
    correction = CANCELS if config["norm_feature_map"] else correction
    return Layer(
        hook=HookPoint(
            module="fla.layers.linear_attn",
            operators=("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"),
            per_token=("v",),
            scales_queries=not config["norm_feature_map"],
        ),
        projections="qkvo",
        query=grouped_queries(sizes, correction),
        convolved=False,
        value_norm="norm",
        distinct_value_heads=sizes.heads,
        linear_values=True,
        features=MIXING.get(config["feature_map"], 1),
        correction=correction,
    )


class LinearAttention(ByExpansion):
    """A family whose keys can be cut only with some feature maps."""

    def key_refusal(self, config: Config) -> str | None:
        values = self.with_defaults(config)
        if values["feature_map"] in MIXING:
            return (
                f"its feature map {values['feature_map']} mixes the channels of a head,"
                " so a channel is not one row of the weights"
            )
        if values.get("norm_q") or values.get("norm_k"):
            return "its norm_q or norm_k divides by the sum over a head's channels, which is not supported"
        return None


FAMILIES = (
    LinearAttention(
        model_type="linear_attn",
        layer=layer,
        defaults={
            "hidden_size": 2048, "num_heads": 4, "num_kv_heads": None, "expand_k": 1.0, "expand_v": 1.0,
            "num_hidden_layers": 24, "feature_map": DEFAULT, "norm_feature_map": False, "norm_eps": 1e-6,
        },
        refused={
            f"`feature_map` {', '.join(MIXING)} (the default is {DEFAULT}), `norm_q` or `norm_k`": (
                "channels of a head are mixed, so only values can be cut"
            )
        },
    ),
)  # fmt: skip
