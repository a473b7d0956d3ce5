"""Gated DeltaProduct of flash-linear-attention: n keys for every token, whose rows lie by number, head, channel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slimstate.core.layout import HookPoint, Mixer, Slot
from slimstate.families import fla_layout
from slimstate.families.contract import Config, Library
from slimstate.kernels.fla_rules import gated_delta_rule, rule
from slimstate.kernels.patches import Substitute, needs_torch_gated_rule, too_precise_for_triton

model_type = "gated_deltaproduct"
library: Library = "fla"
softmax_layers, correction = fla_layout.softmax_layers, fla_layout.correction
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_heads": 6,
    "head_dim": 256,
    "expand_v": 2.0,
    "num_hidden_layers": 21,
    "num_householder": 1,
    "use_forget_gate": False,
    "use_output_gate": True,
    "norm_eps": 1e-6,
}


def mixers(config: Config) -> tuple[Mixer, ...]:
    known = {**DEFAULTS, **config}
    heads, width, updates = (int(known[name]) for name in ("num_heads", "head_dim", "num_householder"))
    gates = "a" * bool(known["use_forget_gate"]) + "g" * bool(known["use_output_gate"])
    return fla_layout.mixers(
        config,
        layers=int(known["num_hidden_layers"]),
        heads=heads,
        width=width,
        value_heads=heads,
        value_dim=fla_layout.value_dim_of(known),
        input_size=int(known["hidden_size"]),
        projections="qkvb" + gates + "o",
        hook=HookPoint(
            module="fla.layers.gated_deltaproduct",
            operators=("chunk_gated_delta_product", "fused_recurrent_gated_delta_rule"),
        ),
        key=Slot(parameter="k_proj.weight", copies=updates, copy_stride=heads * width),
        value_rows=heads * updates,
    )


def resize(config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
    """The config of the same model with `key_dim` channels per head and the value width it had."""
    known = {**DEFAULTS, **config}
    return fla_layout.resized_by_head_dim(known, config, key_dim, correction(config) if corrected else None)


def delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """n updates for each token (k, v, beta are n times as long): decay before the first, reading after the last."""

    def spread(x: Tensor, place: int) -> Tensor:
        steps = x.new_zeros(*x.shape[:2], num_householder, *x.shape[2:])
        steps[:, :, place] = x
        return steps.flatten(1, 2)

    o, state = rule(
        spread(q, -1),
        k,
        v,
        beta,
        None if g is None else spread(g, 0),
        scale=scale,
        state=initial_state,
        final=output_final_state,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens * num_householder,
        normalise=use_qk_l2norm_in_kernel,
    )
    return o.unflatten(1, (-1, num_householder))[:, :, -1], state


def beyond_triton(*args: Any, g: Tensor | None = None, **kwargs: Any) -> bool:
    """fla takes half precision only, and is without a backward where the gated rule is, unless there is no gate."""
    return too_precise_for_triton(*args, **kwargs) or (g is not None and needs_torch_gated_rule(*args, g=g, **kwargs))


SUBSTITUTES = (
    Substitute("fla.layers.gated_deltaproduct.chunk_gated_delta_product", delta_product, beyond_triton),
    Substitute("fla.layers.gated_deltaproduct.fused_recurrent_gated_delta_rule", gated_delta_rule),
)
