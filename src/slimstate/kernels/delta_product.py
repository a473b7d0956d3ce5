"""The gated delta product: n updates of the delta rule for each token, then one output.

k, v and beta are n times as long as q and g. The state decays before the first update of a token and is read after the
last: this is the delta rule on n times as many steps, of which most have no decay and no query.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from slimstate.kernels.delta_rule import delta_rule
from slimstate.kernels.fla_calls import CallOptions, call
from slimstate.kernels.patches import Patch, needs_torch_gated_rule, too_precise_for_triton


def spread(x: Tensor, updates: int, place: int) -> Tensor:
    """Spread [B, T, ...] to [B, n T, ...], with zeros at all updates of a token but one."""
    steps = x.new_zeros(*x.shape[:2], updates, *x.shape[2:])
    steps[:, :, place] = x
    return steps.flatten(1, 2)


def delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, num_householder: int, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute it as fla's layers call it, with n = `num_householder`."""
    known = CallOptions.read(options)
    if known.cu_seqlens is not None:
        known = replace(known, cu_seqlens=known.cu_seqlens * num_householder)
    decay = None if g is None else spread(g, num_householder, 0)
    o, state = call(delta_rule, known, q=spread(q, num_householder, -1), k=k, v=v, beta=beta, g=decay)
    return o.unflatten(1, (-1, num_householder))[:, :, -1], state


def beyond_triton(*args: Any, g: Tensor | None = None, **kwargs: Any) -> bool:
    """Return whether fla's kernel cannot run: in float32, or for a backward pass where that of the gated rule fails."""
    return too_precise_for_triton(*args, **kwargs) or (g is not None and needs_torch_gated_rule(*args, g=g, **kwargs))


PATCHES = (Patch("fla.layers.gated_deltaproduct.chunk_gated_delta_product", delta_product, beyond_triton),)
