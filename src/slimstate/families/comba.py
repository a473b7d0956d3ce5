"""Comba of flash-linear-attention: a gated delta rule that erases by a vector p made of the key, channel by channel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slimstate.core.layout import HookPoint, Mixer
from slimstate.families import fla_layout
from slimstate.families.contract import Config, Library
from slimstate.kernels.fla_rules import rule
from slimstate.kernels.patches import in_place_of, needs_torch_gated_rule

model_type = "comba"
library: Library = "fla"
softmax_layers, correction = fla_layout.softmax_layers, fla_layout.correction
OPERATORS = ("chunk_comba", "fused_recurrent_comba")
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_heads": 6,
    "num_v_heads": None,
    "head_dim": 256,
    "expand_v": 2.0,
    "num_hidden_layers": 21,
    "use_output_gate": True,
    "norm_eps": 1e-6,
}


def mixers(config: Config) -> tuple[Mixer, ...]:
    known = {**DEFAULTS, **config}
    return fla_layout.mixers(
        config,
        **fla_layout.sizes_by_head_dim(known),
        projections="qkvab" + "g" * bool(known["use_output_gate"]) + "o",
        hook=HookPoint(module="fla.layers.comba", operators=OPERATORS, companions=("p",)),
    )


def resize(config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
    """The config of the same model with `key_dim` channels per head and the value width it had."""
    known = {**DEFAULTS, **config}
    return fla_layout.resized_by_head_dim(known, config, key_dim, correction(config) if corrected else None)


def comba_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule that looks up what to erase by p instead of k, and before the state decays.

    So do fla's kernels and its `naive_chunk_comba`; its `naive_recurrent_comba` lets the state decay first.
    """
    return rule(
        q,
        k,
        v,
        beta,
        g,
        scale=scale,
        state=initial_state,
        final=output_final_state,
        cu_seqlens=cu_seqlens,
        normalise=use_qk_l2norm_in_kernel,
        erase=p,
    )


SUBSTITUTES = in_place_of("fla.layers.comba", OPERATORS, comba_rule, needs_torch_gated_rule)
