"""Kimi Delta Attention: the delta rule with a decay for every key channel, g [B, T, G, K]."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from slimstate.kernels.delta_rule import delta_rule
from slimstate.kernels.fla_calls import CallOptions, call, wide
from slimstate.kernels.patches import in_place_of


def kimi_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute it as fla's layers call it."""
    known = CallOptions.read(options)
    return call(delta_rule, known, q=q, k=k, v=v, beta=known.strength(beta), g=_decay(g, known))


def _decay(g: Tensor, options: CallOptions) -> Tensor:
    """Return the logarithm of the decay, which some layers leave to the kernel to compute."""
    if not options.use_gate_in_kernel:
        return g
    assert options.A_log is not None
    biased = wide(g) if options.dt_bias is None else wide(g) + wide(options.dt_bias).view(g.shape[-2:])
    rate = wide(options.A_log).exp().unsqueeze(-1)
    if options.lower_bound is None:
        return -rate * F.softplus(biased)
    return options.lower_bound * (rate * biased).sigmoid()


PATCHES = in_place_of("fla.layers.kda", ("chunk_kda", "fused_recurrent_kda"), kimi_delta_rule)
