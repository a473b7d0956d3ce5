"""RWKV-6 of flash-linear-attention: r is the query, every key channel has a decay w and a bonus u for the newest token.

Queries are not scaled, and channels are not mixed before the state is read: a zeroed channel adds zero. The inputs of
projections are mixtures of a token and the one before it.
"""

from slimstate.core.layout import HookPoint, Slot
from slimstate.families.contract import Config, Correction, Sizes
from slimstate.families.fla_layout import ByExpansion, Layer

UNSCALED = Correction(why="these layers do not scale queries, whatever the key dim, so that cutting equals zeroing")
DECAY = "w_proj.linear.lora.2"


def layer(config: Config, sizes: Sizes) -> Layer:
    maps = (f"{letter}_proj.linear" for letter in "rkvg")
    return Layer(
        hook=HookPoint(
            module="fla.layers.rwkv6",
            operators=("chunk_rwkv6", "fused_recurrent_rwkv6"),
            query="r",
            per_token=("v", "w"),
            scales_queries=False,
        ),
        # without the second map of x_proj: the layer would ignore an adapter of it
        projections=(*maps, "w_proj.linear.lora.0", DECAY, "x_proj.0.linear", "o"),
        query=Slot(parameter="r_proj.linear.weight"),
        key=Slot(parameter="k_proj.linear.weight"),
        gates=(
            Slot(parameter=f"{DECAY}.weight"),
            Slot(parameter=f"{DECAY}.bias"),
            Slot(parameter="bonus", by_head=True),
        ),
        convolved=False,
        value_norm=None,
        correction=UNSCALED,
    )


FAMILIES = (
    ByExpansion(
        model_type="rwkv6",
        layer=layer,
        defaults={"hidden_size": 2048, "num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "num_hidden_layers": 24},
        fixed_values="its norm over values subtracts their mean, so that dropped values would change the others",
    ),
)
