"""Comba: the gated delta rule that looks up what to erase by p instead of k, in the state before its decay.

    S_t = e^{g_t} S_{t-1} + k_t u_t',   u_t = beta_t (v_t - S_{t-1}' p_t),   o_t = scale S_t' q_t

This is what fla's kernels and its `naive_chunk_comba` compute; in its `naive_recurrent_comba` the state decays first.
Both forms are those of `delta_rule` with `erase`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slimstate.kernels.delta_rule import delta_rule
from slimstate.kernels.fla_calls import CallOptions, call
from slimstate.kernels.patches import in_place_of, needs_torch_gated_rule


def comba_rule(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute it as fla's layers call it."""
    return call(delta_rule, CallOptions.read(options), q=q, k=k, v=v, beta=beta, g=g, erase=p)


PATCHES = in_place_of("fla.layers.comba", ("chunk_comba", "fused_recurrent_comba"), comba_rule, needs_torch_gated_rule)
