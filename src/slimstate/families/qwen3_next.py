"""Qwen3-Next: one projection with rows by key head, [q D][k D][v][z] each; one convolution over [q | k | v]."""

from slimstate.core.layout import Slot
from slimstate.families.contract import Sizes, fused_filters, scalar_axis
from slimstate.families.gated_delta_hybrid import DEFAULTS, GatedDeltaHybrid, Layout, value_axis


def interleaved(sizes: Sizes) -> Layout:
    ratio = sizes.value_heads // sizes.heads
    block = 2 * sizes.width + 2 * ratio * sizes.value_dim
    value, gate = (
        Slot(parameter="in_proj_qkvz.weight", start=start, head_stride=block, block=ratio)
        for start in (2 * sizes.width, 2 * sizes.width + ratio * sizes.value_dim)
    )
    strength, decay = (
        Slot(parameter="in_proj_ba.weight", start=start, head_stride=2 * ratio, block=ratio) for start in (0, ratio)
    )
    return Layout(
        query=Slot(parameter="in_proj_qkvz.weight", head_stride=block),
        key=Slot(parameter="in_proj_qkvz.weight", start=sizes.width, head_stride=block),
        others=(Slot(parameter="conv1d.weight"), Slot(parameter="conv1d.weight", start=sizes.keys)),
        filters=fused_filters(sizes, query=0, key=sizes.keys, value=2 * sizes.keys),
        values=value_axis(sizes, value, gate, Slot(parameter="conv1d.weight", start=2 * sizes.keys)),
        scalars=scalar_axis(sizes, strength, decay, "A_log", "dt_bias"),
        projections=("in_proj_qkvz", "in_proj_ba", "out_proj"),
    )


FAMILIES = (GatedDeltaHybrid(model_type="qwen3_next", module="qwen3_next", layout=interleaved, defaults=DEFAULTS),)
