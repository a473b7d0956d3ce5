"""OLMo-Hybrid: separate projections, and in the files separate convolutions, which the running model joins.

The epsilon of the norm after the state is in the code (1e-5), not in the config: the query scale cannot be corrected.
"""

from slimstate.core.layout import Slot
from slimstate.families.contract import Config, Correction, Sizes, filter_axis
from slimstate.families.gated_delta_hybrid import DEFAULTS, GatedDeltaHybrid, Layout, layer_types

HARD_CODED = Correction(
    why="cannot be corrected, because the epsilon of the norm after the state is fixed in the stock class (1e-5); the"
    " cut zeroes the channels and uses the query scale of the new key dim"
)


def separate(sizes: Sizes) -> Layout:
    query, key, *others = (Slot(parameter=f"{letter}_{part}.weight") for part in ("proj", "conv1d") for letter in "qk")
    return Layout(
        query=query,
        key=key,
        others=tuple(others),
        filters=(
            ("query", filter_axis("q_conv1d.weight", sizes.heads, sizes.width)),
            ("key", filter_axis("k_conv1d.weight", sizes.heads, sizes.width)),
            ("value", filter_axis("v_conv1d.weight", sizes.value_heads, sizes.value_dim)),
        ),
        values=None,
        projections=tuple(f"{letter}_proj" for letter in "qkvabgo"),
        joined=(("conv1d.weight", tuple(f"{letter}_conv1d.weight" for letter in "qkv")),),
        correction=HARD_CODED,
    )


class OlmoHybrid(GatedDeltaHybrid):
    """A family whose config may leave out the sizes of linear layers, which then follow from the others."""

    def with_defaults(self, config: Config) -> Config:
        text = dict(super().with_defaults(config))
        for name in ("linear_num_key_heads", "linear_num_value_heads"):
            text.setdefault(name, text["num_attention_heads"])
        text.setdefault("linear_key_head_dim", int(0.75 * text["hidden_size"] / text["linear_num_key_heads"]))
        text.setdefault("linear_value_head_dim", 2 * text["linear_key_head_dim"])
        if text.get("layer_types") is None:
            kinds = layer_types({"num_hidden_layers": text["num_hidden_layers"]})
            text["layer_types"] = kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]
        return text


FAMILIES = (
    OlmoHybrid(
        model_type="olmo_hybrid",
        module="olmo_hybrid",
        layout=separate,
        fixed_values="the epsilon of the norm over its values is fixed in the stock class (1e-5)",
        defaults={
            "hidden_size": 3840, "num_hidden_layers": 32, "num_attention_heads": 30,
            "rms_norm_eps": DEFAULTS["rms_norm_eps"],
        },
    ),
)  # fmt: skip
