"""MesaNet of flash-linear-attention: a state of keys beside that of values, and one width for both.

Queries are solved for in the products of the keys, and scaled by nothing. Values are a linear map of the input, so
their rows absorb what a norm over fewer of them changes.
"""

from slimstate.core.layout import HookPoint, Slot
from slimstate.families.contract import Config, Correction, Sizes
from slimstate.families.fla_layout import FlaFamily, Layer

UNSCALED = Correction(why="these layers do not scale queries, so that cutting equals zeroing")


def layer(config: Config, sizes: Sizes) -> Layer:
    return Layer(
        hook=HookPoint(
            module="fla.layers.mesa_net", operators=("chunk_mesa_net",), step_operator="mesa_net_decoding_one_step",
            initial_state="h_kv_init", initial_key_state="h_kk_init", scales_queries=False,
        ),
        projections="qkvab" + "g" * bool(config["use_output_gate"]) + "o",
        gates=(Slot(parameter="lambda_params"),),
        convolved_value_heads=0,
        tied=True,
        linear_values=True,
        correction=UNSCALED,
    )  # fmt: skip


class MesaNet(FlaFamily):
    """A family with one width for keys and values."""

    one_width: bool = True

    def with_defaults(self, config: Config) -> Config:
        return {**super().with_defaults(config), "use_short_conv": True}  # its layers have filters in any case

    def sizes(self, config: Config) -> Sizes:
        values = self.with_defaults(config)
        heads, width = int(values["num_heads"]), int(values["head_dim"])
        size = int(values["hidden_size"])
        return Sizes(heads=heads, width=width, value_heads=heads, value_dim=width, input_size=size)

    def fields_for(self, config: Config, sizes: Sizes) -> Config:
        return {"head_dim": self.one_dim(sizes)}


FAMILIES = (
    MesaNet(
        model_type="mesa_net",
        layer=layer,
        defaults={
            "hidden_size": 2048, "num_heads": 16, "head_dim": 128, "use_output_gate": False, "num_hidden_layers": 24,
            "norm_eps": 1e-6,
        },
    ),
)  # fmt: skip
