"""Qwen3.5, with and without experts, and Qwen4: a projection and a convolution, both with rows [q | k | v].

A vision-language checkpoint has the config of the language model under `text_config` and its tensors under
`model.language_model`; the language model alone has neither.
"""

from slimstate.core.layout import Slot
from slimstate.families.contract import Sizes, fused_filters, scalar_axis
from slimstate.families.gated_delta_hybrid import DEFAULTS, GatedDeltaHybrid, Layout, value_axis

STOCK = {
    "qwen3_5": {"hidden_size": 4096, "num_hidden_layers": 32},
    "qwen3_5_moe": {"num_hidden_layers": 40},
    "qwen4_exp": {"num_hidden_layers": 40},
}


def side_by_side(sizes: Sizes) -> Layout:
    names = ("in_proj_qkv.weight", "conv1d.weight")
    value, filters = (Slot(parameter=name, start=2 * sizes.keys) for name in names)
    (query, key), others = ([Slot(parameter=name), Slot(parameter=name, start=sizes.keys)] for name in names)
    return Layout(
        query=query,
        key=key,
        others=tuple(others),
        filters=fused_filters(sizes, query=0, key=sizes.keys, value=2 * sizes.keys),
        values=value_axis(sizes, value, Slot(parameter="in_proj_z.weight"), filters),
        scalars=scalar_axis(sizes, "in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"),
        projections=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    )


FAMILIES = tuple(
    GatedDeltaHybrid(
        model_type=name if nested else f"{name}_text",
        module=name,
        layout=side_by_side,
        defaults={**DEFAULTS, **changes},
        nested=nested,
    )
    for name, changes in STOCK.items()
    for nested in (True, False)
)
