"""DeltaNet of flash-linear-attention. The config stores the key width as a ratio to the hidden size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimstate.core.layout import HookPoint, Mixer
from slimstate.families import fla_layout
from slimstate.families.contract import Config, Library
from slimstate.kernels.fla_rules import rule
from slimstate.kernels.patches import Substitute, too_precise_for_triton

model_type = "delta_net"
library: Library = "fla"
softmax_layers, correction = fla_layout.softmax_layers, fla_layout.correction
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_heads": 16,
    "expand_k": 1.0,
    "expand_v": 1.0,
    "num_hidden_layers": 24,
    "qk_activation": "silu",
    "qk_norm": "l2",
    "use_beta": True,
    "use_gate": False,
    "norm_eps": 1e-6,
}


def mixers(config: Config) -> tuple[Mixer, ...]:
    known = {**DEFAULTS, **config}
    heads, hidden = int(known["num_heads"]), int(known["hidden_size"])
    return fla_layout.mixers(
        config,
        layers=int(known["num_hidden_layers"]),
        heads=heads,
        width=fla_layout.per_head(hidden, known["expand_k"], heads, "expand_k"),
        value_heads=heads,
        value_dim=fla_layout.per_head(hidden, known["expand_v"], heads, "expand_v"),
        input_size=hidden,
        projections="qkv" + "b" * bool(known["use_beta"]) + "g" * bool(known["use_gate"]) + "o",
        hook=HookPoint(
            module="fla.layers.delta_net",
            operators=("chunk_delta_rule", "fused_recurrent_delta_rule"),
            normaliser="sum_norm" if known["qk_norm"] == "sum" else None,
        ),
        noncommuting=_noncommuting(known["qk_activation"], known["qk_norm"]),
    )


def resize(config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
    """The config of the same model with `key_dim` channels per head."""
    known = {**DEFAULTS, **config}
    return fla_layout.resized_by_expansion(known, config, key_dim, correction(config) if corrected else None)


def _noncommuting(activation: str, norm: str) -> tuple[str, ...]:
    """A length is the same in every basis, a sum of channels is not."""
    found = () if activation == "identity" else (f"the activation {activation}",)
    return found if norm == "l2" else (*found, f"the norm {norm}")


def plain_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    beta = torch.ones_like(q[..., 0]) if beta is None else beta
    return rule(
        q,
        k,
        v,
        beta,
        None,
        scale=scale,
        state=initial_state,
        final=output_final_state,
        cu_seqlens=cu_seqlens,
        normalise=use_qk_l2norm_in_kernel,
    )


SUBSTITUTES = (
    Substitute("fla.layers.delta_net.chunk_delta_rule", plain_delta_rule, too_precise_for_triton),
    Substitute("fla.layers.delta_net.fused_recurrent_delta_rule", plain_delta_rule),
)
