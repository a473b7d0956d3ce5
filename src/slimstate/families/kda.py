"""Kimi Delta Attention of flash-linear-attention: Gated DeltaNet with a decay for every key channel and value head."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from slimstate.core.layout import HookPoint, Mixer
from slimstate.families import fla_layout
from slimstate.families.contract import Config, Library
from slimstate.kernels.fla_rules import opened, rule, wide
from slimstate.kernels.patches import in_place_of

model_type = "kda"
library: Library = "fla"
softmax_layers, correction = fla_layout.softmax_layers, fla_layout.correction
OPERATORS = ("chunk_kda", "fused_recurrent_kda")
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_heads": 16,
    "num_v_heads": None,
    "head_dim": 128,
    "expand_v": 1.0,
    "num_hidden_layers": 24,
    "norm_eps": 1e-6,
}


def mixers(config: Config) -> tuple[Mixer, ...]:
    known = {**DEFAULTS, **config}
    sizes = fla_layout.sizes_by_head_dim(known)
    copies = max(1, sizes["value_heads"] // sizes["heads"])
    return fla_layout.mixers(
        config,
        **sizes,
        projections=("q", "k", "v", "b", "f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1", "o"),
        hook=HookPoint(module="fla.layers.kda", operators=OPERATORS),
        gates=tuple(fla_layout.per_group(name, sizes["width"], copies) for name in ("f_proj.1.weight", "dt_bias")),
    )


def resize(config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
    """The config of the same model with `key_dim` channels per head and the value width it had."""
    known = {**DEFAULTS, **config}
    return fla_layout.resized_by_head_dim(known, config, key_dim, correction(config) if corrected else None)


def kimi_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule with a decay of its own for every key channel."""
    if use_gate_in_kernel:
        assert A_log is not None
        g = wide(g) if dt_bias is None else wide(g) + wide(dt_bias).view(g.shape[-2:])
        rate = wide(A_log).exp().unsqueeze(-1)
        g = -rate * F.softplus(g) if lower_bound is None else lower_bound * (rate * g).sigmoid()
    return rule(
        q,
        k,
        v,
        opened(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        g,
        scale=scale,
        state=initial_state,
        final=output_final_state,
        cu_seqlens=cu_seqlens,
        normalise=use_qk_l2norm_in_kernel,
        value_first=state_v_first,
        by_channel=True,
    )


SUBSTITUTES = in_place_of("fla.layers.kda", OPERATORS, kimi_delta_rule)
