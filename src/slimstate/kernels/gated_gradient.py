"""One step of the backward pass of fla's rules with a decay by head, which Triton 3.4 to 3.7.0 miscompiles on Hopper.

fla refuses the backward pass of the gated delta rule, Comba and simple GLA there because of one kernel of several,
`chunk_bwd_dqkwg`, which multiplies by the transpose of a product (fla issue 640, pull request 826). This is that step
in a kernel that transposes no product (`gated_gradient_triton`); all others remain fla's.
"""

from typing import Any

import torch
from torch import Tensor

from slimstate.kernels.patches import Backend, gated_backward_refused


def output_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of q, k, w and the sums of g, as fla's `chunk_bwd_dqkwg` does with the same arguments."""
    from slimstate.kernels.gated_gradient_triton import Tensors, gradients

    size, sequences, dv = options.get("chunk_size", 64), options.get("cu_seqlens"), options.get("dv")
    batch, time, shared, key_dim = k.shape
    edges = torch.arange(0, batch * time + 1, time, device=k.device) if sequences is None else sequences
    chunks = _chunks(edges, size, h.shape[0] * h.shape[1])
    scale = key_dim**-0.5 if options.get("scale") is None else options["scale"]
    tensors = (x.contiguous() for x in (q, k, v, do, options["g"], v if dv is None else dv, h, dh))
    values_first = bool(options.get("state_v_first"))
    by_query, by_key, dw, db = gradients(
        Tensors(*chunks, *tensors), scale, size, has_dv=dv is not None, values_first=values_first
    )
    dq, dk = (x if x.shape[2] == shared else x.unflatten(2, (shared, -1)).sum(3) for x in (by_query, by_key))
    return dq, dk, None if dv is None else dw, db


def _chunks(edges: Tensor, size: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the first token and the number of tokens of each of `count` chunks of sequences that lie end to end."""
    counts = (edges.diff() + size - 1) // size
    sequence = torch.arange(len(counts), device=edges.device).repeat_interleave(counts, output_size=count)
    place = torch.arange(count, device=edges.device) - (counts.cumsum(0) - counts)[sequence]
    starts = edges[sequence] + place * size
    return starts, (edges[sequence + 1] - starts).clamp(max=size)


def _is_refused(*_: Any, g: Tensor | None = None, **__: Any) -> bool:
    return g is not None and gated_backward_refused()


PATCHES = (Backend("fla.ops.common.chunk_o.chunk_bwd_dqkwg", output_gradients, _is_refused, "common"),)
