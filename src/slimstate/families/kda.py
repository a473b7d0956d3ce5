"""Kimi Delta Attention of flash-linear-attention: Gated DeltaNet with a decay for every key channel and value head."""

from slimstate.core.layout import HookPoint
from slimstate.families.contract import Config, Sizes
from slimstate.families.fla_layout import ByHeadDim, Layer, per_group


def layer(config: Config, sizes: Sizes) -> Layer:
    copies = max(1, sizes.value_heads // sizes.heads)
    return Layer(
        hook=HookPoint(module="fla.layers.kda", operators=("chunk_kda", "fused_recurrent_kda")),
        projections=("q", "k", "v", "b", "f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1", "o"),
        value_norm=None,
        gates=tuple(per_group(name, sizes.width, copies) for name in ("f_proj.1.weight", "dt_bias")),
    )


FAMILIES = (
    ByHeadDim(
        model_type="kda",
        layer=layer,
        fixed_values="its gates pass through bottlenecks as wide as the values of a head, which a cut would narrow",
        defaults={
            "hidden_size": 2048, "num_heads": 16, "num_v_heads": None, "head_dim": 128, "expand_v": 1.0,
            "num_hidden_layers": 24, "norm_eps": 1e-6,
        },
    ),
)  # fmt: skip
