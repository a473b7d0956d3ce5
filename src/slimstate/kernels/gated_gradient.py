"""One step of the backward pass of fla's rules with a decay by head, which Triton 3.4 to 3.7.0 miscompiles on Hopper.

fla refuses the backward pass of the gated delta rule, Comba and simple GLA there because of one kernel of several,
`chunk_bwd_dqkwg`, which multiplies by the transpose of a product (fla issue 640, pull request 826). This is that step
by matrix products of PyTorch; all others remain fla's.

M matrices, one for each chunk of C tokens and each value head; K key dim, V value dim. q, k [M, C, K]; v, the updates
of the state, and do, the gradient of the outputs [M, C, V]; h, the state before a chunk, and dh, the gradient of the
state after it [M, K, V]; b [M, C, 1], the binary logarithm of the decay from the start of the chunk.

    o = scale (2^b q h + (q k' * 2^{b_t - b_s}) v),   h_1 = 2^{b_C} h + (2^{b_C - b} k)' v
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimstate.kernels.chunks import lower, split_time
from slimstate.kernels.fla_calls import Packing, per_value_head, wide
from slimstate.kernels.patches import Backend, gated_backward_refused

# elements of a tensor that are computed at once
MAX_ELEMENTS = 2**25


class EvenChunks:
    """Convert sequences of one length [B, T, ...] to chunks [B N, C, ...] and back."""

    def __init__(self, like: Tensor, chunk: int) -> None:
        (self.batch, self.time), self.chunk = like.shape[:2], chunk
        rest = self.time - torch.arange(0, self.time, chunk, device=like.device)
        self.lengths = rest.clamp(max=chunk).repeat(self.batch)

    def pad(self, x: Tensor) -> Tensor:
        return split_time(x, self.chunk).flatten(0, 1)

    def pack(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.batch, -1)).flatten(1, 2)[:, : self.time]


class PackedChunks(Packing):
    """Convert sequences of any lengths, packed end to end, to chunks and back."""

    def __init__(self, cu_seqlens: Tensor, chunk: int) -> None:
        ends = [torch.arange(a + chunk, b + chunk, chunk).clamp(max=b) for a, b in cu_seqlens.unfold(0, 2, 1).tolist()]
        edges = torch.cat([torch.zeros(1, dtype=torch.long), *ends]).to(cu_seqlens.device)
        super().__init__(edges)
        self.lengths = edges.diff()


class Chunked(NamedTuple):
    """What the step takes, in N chunks of all sequences: [N, C, H, ...] by token, [N, H, K, V] for states."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    b: Tensor
    # the gradient of the updates, of which that of w is a product; None without a delta rule
    dv: Tensor | None
    h: Tensor
    dh: Tensor
    # tokens of each chunk [N]
    lengths: Tensor


def output_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of q, k, w and the sums of g, as fla's `chunk_bwd_dqkwg` does with the same arguments."""
    size, sequences, dv = options.get("chunk_size", 64), options.get("cu_seqlens"), options.get("dv")
    chunks = EvenChunks(k, size) if sequences is None else PackedChunks(sequences, size)
    scale = k.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    states = ((x.mT if options.get("state_v_first") else x).flatten(0, 1) for x in (h, dh))
    updates = None if dv is None else chunks.pad(dv)
    whole: Any = (*map(chunks.pad, (q, k, v, do, options["g"])), updates, *states, chunks.lengths)
    step = max(1, MAX_ELEMENTS // (size * v.shape[2] * max(k.shape[-1], v.shape[-1])))
    parts = (
        Chunked(*(None if x is None else x[start : start + step] for x in whole))  # type: ignore[arg-type]
        for start in range(0, len(chunks.lengths), step)
    )
    results = zip(*(_gradients(part, scale) for part in parts), strict=True)
    gradients: Any = (None if x[0] is None else chunks.pack(torch.cat(x)) for x in results)
    return tuple(gradients)  # type: ignore[return-value]


def _gradients(x: Chunked, scale: float) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of some chunks, by token."""
    heads, shared = x.v.shape[2], x.q.shape[2]
    q, k, v, do, b = (_by_head(y) for y in (*(per_value_head(y, x.v) for y in x[:2]), x.v, x.do, x.b.unsqueeze(-1)))
    h, dh = x.h.flatten(0, 1), x.dh.flatten(0, 1)
    length = x.lengths.repeat_interleave(heads).view(-1, 1, 1)
    last, place = b.gather(1, length - 1), torch.arange(b.shape[1], device=b.device).unsqueeze(-1)
    b = torch.where(place < length, b, last)
    between = (b - b.mT).masked_fill(~lower(b.shape[1], 0, b.device), -torch.inf).exp2()
    inside = (_product(do, v.mT) * between).mul_(scale)
    # a token's decay does not reach its own update: what would cancel on the diagonal is left out, not rounded twice
    pairs = (inside * _product(q, k.mT)).tril_(-1)
    inside = inside.to(k.dtype)
    read = _product(do, h.mT) * (b.exp2() * scale)
    stored = _product(v, dh.mT) * (last - b).exp2()
    by_key = (stored * k).sum(-1, keepdim=True)
    end = last.exp2() * (wide(h) * wide(dh)).sum((1, 2), keepdim=True) + by_key.sum(1, keepdim=True)
    db = (read * q).sum(-1, keepdim=True) + pairs.sum(-1, keepdim=True) - pairs.sum(1).unsqueeze(-1) - by_key
    db = db + end * (place == length - 1)
    dq, dk = read.add_(_product(inside, k)), stored.add_(_product(inside.mT, q))
    dw = None if x.dv is None else _by_token(-_product(_by_head(x.dv), h.mT), heads).to(k.dtype)
    by_group = (_by_token(y, heads).unflatten(2, (shared, -1)).sum(3).to(k.dtype) for y in (dq, dk))
    return *by_group, dw, _by_token(db, heads).squeeze(-1)


def _by_head(x: Tensor) -> Tensor:
    """Return [N, C, H, D] as [N H, C, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_token(x: Tensor, heads: int) -> Tensor:
    """Return [N H, C, D] as [N, C, H, D]."""
    return x.unflatten(0, (-1, heads)).transpose(1, 2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b in float32, from factors in the precision of the first."""
    b = b.to(a.dtype)
    if a.is_cuda and a.element_size() == 2:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(wide(a), wide(b))


def _is_refused(*_: Any, g: Tensor | None = None, **__: Any) -> bool:
    return g is not None and gated_backward_refused()


PATCHES = (Backend("fla.ops.common.chunk_o.chunk_bwd_dqkwg", output_gradients, _is_refused, "common"),)
