"""The gradients of keys, queries and decays of a gated rule in chunks, in one Triton kernel.

For one chunk of C tokens and one value head; K key dim, V value dim: q, k [C, K]; v, the updates of the state, and do,
the gradient of the outputs [C, V]; h, the state before the chunk, and dh, the gradient of the state after it [V, K];
b [C], the binary logarithm of the decay from the start of the chunk.

    o = scale (2^b q h' + (q k' * 2^{b_t - b_s}) v),   h_1 = 2^{b_C} h + v' (2^{b_C - b} k)

The matrix of a chunk is computed twice, in both orders, because Triton 3.4 to 3.7.0 miscompiles products with the
transpose of a product on Hopper. Importing this module imports triton.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # channels of a block; two blocks of gradients and two matrices of a chunk fit into registers
WARPS = 8


class Tensors(NamedTuple):
    """What the kernel reads: by chunk, its first token and how many it has; by token; and the states of chunks.

    q, k [B, T, H, K]; v, do, dv [B, T, HV, V]; b [B, T, HV]; h, dh [B, N, HV, K, V], or [B, N, HV, V, K].
    """

    starts: Tensor
    lengths: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    b: Tensor
    dv: Tensor  # the gradient of the updates, of which that of w is a product; any tensor without a delta rule
    h: Tensor
    dh: Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _decay_gradient(inside, read, stored, b_q, b_k, through, place, length):  # type: ignore[no-untyped-def]
    """Return the gradient of b in one chunk.

    A decay reaches pairs of different tokens only: the diagonal, which would cancel, is left out.
    """
    scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    pairs = tl.where(place[:, None] > place[None, :], inside * scores, 0.0)
    by_key = tl.sum(stored * b_k.to(tl.float32), 1)
    by_decay = tl.sum(read * b_q.to(tl.float32), 1) + tl.sum(pairs, 1) - tl.sum(pairs, 0) - by_key
    return by_decay + tl.where(place == length - 1, through + tl.sum(by_key, 0), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _gradients(  # type: ignore[no-untyped-def]
    tensors, results, scale, tokens, SIZES: tl.constexpr, BLOCKS: tl.constexpr, HAS_DV: tl.constexpr,
    VALUES_FIRST: tl.constexpr,
):  # fmt: skip
    """Run for each block of key channels, each chunk and each value head. Triton evaluates annotations."""
    starts, lengths, q, k, v, do, b, dv, h, dh = tensors
    dq, dk, dw, db = results
    H: tl.constexpr = SIZES[0]
    HV: tl.constexpr = SIZES[1]
    K: tl.constexpr = SIZES[2]
    V: tl.constexpr = SIZES[3]
    C: tl.constexpr = BLOCKS[0]
    BK: tl.constexpr = BLOCKS[1]
    BV: tl.constexpr = BLOCKS[2]
    block, chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, length = tl.load(starts + chunk), tl.load(lengths + chunk)
    place = tl.arange(0, C)
    here, row = place < length, (start + place).to(tl.int64)
    channel = block * BK + tl.arange(0, BK)
    keys = here[:, None] & (channel < K)[None, :]
    at_key = (row[:, None] * H + head // (HV // H)) * K + channel[None, :]
    at_result = (row[:, None] * HV + head) * K + channel[None, :]
    decay = tl.load(b + row * HV + head, mask=here, other=0.0).to(tl.float32)
    last = tl.load(b + (start + length - 1) * HV + head).to(tl.float32)

    inside, mirror = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    read, stored = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    write, through = tl.zeros([C, BK], tl.float32), 0.0
    for first in range(0, V, BV):
        value = first + tl.arange(0, BV)
        values = here[:, None] & (value < V)[None, :]
        at_value = (row[:, None] * HV + head) * V + value[None, :]
        states = (value < V)[:, None] & (channel < K)[None, :]
        by_value, by_channel = (K, 1) if VALUES_FIRST else (1, V)
        at_state = (chunk * HV + head) * V * K + value[:, None] * by_value + channel[None, :] * by_channel
        b_v, b_do = tl.load(v + at_value, mask=values, other=0.0), tl.load(do + at_value, mask=values, other=0.0)
        b_h, b_dh = tl.load(h + at_state, mask=states, other=0.0), tl.load(dh + at_state, mask=states, other=0.0)
        through += tl.sum(tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1), 0)
        inside = tl.dot(b_do, tl.trans(b_v), inside, input_precision="ieee")
        mirror = tl.dot(b_v, tl.trans(b_do), mirror, input_precision="ieee")
        read = tl.dot(b_do, b_h.to(b_do.dtype), read, input_precision="ieee")
        stored = tl.dot(b_v, b_dh.to(b_v.dtype), stored, input_precision="ieee")
        if HAS_DV:
            b_dv = tl.load(dv + at_value, mask=values, other=0.0)
            write = tl.dot(b_dv, b_h.to(b_dv.dtype), write, input_precision="ieee")
    if HAS_DV:
        tl.store(dw + at_result, (-write).to(dw.dtype.element_ty), mask=keys)
    b_q, b_k = tl.load(q + at_key, mask=keys, other=0.0), tl.load(k + at_key, mask=keys, other=0.0)
    difference, both = decay[:, None] - decay[None, :], here[:, None] & here[None, :]
    later, earlier = place[:, None] >= place[None, :], place[:, None] <= place[None, :]
    inside *= tl.exp2(tl.where(later & both, difference, float("-inf"))) * scale
    mirror *= tl.exp2(tl.where(earlier & both, -difference, float("-inf"))) * scale
    read *= (tl.exp2(decay) * scale)[:, None]
    stored *= tl.exp2(last - decay)[:, None]
    by_decay = _decay_gradient(inside, read, stored, b_q, b_k, tl.exp2(last) * through, place, length)
    tl.store(db + (block * tokens + row) * HV + head, by_decay, mask=here)
    by_query = tl.dot(inside.to(b_k.dtype), b_k, read, input_precision="ieee")
    tl.store(dq + at_result, by_query.to(dq.dtype.element_ty), mask=keys)
    by_key_of_token = tl.dot(mirror.to(b_q.dtype), b_q, stored, input_precision="ieee")
    tl.store(dk + at_result, by_key_of_token.to(dk.dtype.element_ty), mask=keys)


def gradients(tensors: Tensors, scale: float, chunk: int, *, has_dv: bool, values_first: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and w for each value head [B, T, HV, K], and those of b, in float32."""
    (*sizes, value_heads, value_dim), (heads, key_dim) = tensors.v.shape, tensors.k.shape[2:]
    width, height = (min(BLOCK, max(16, triton.next_power_of_2(dim))) for dim in (key_dim, value_dim))
    blocks, tokens = triton.cdiv(key_dim, width), sizes[0] * sizes[1]
    results = [tensors.k.new_empty(*sizes, value_heads, key_dim) for _ in range(3)]
    db = torch.empty(blocks, *sizes, value_heads, dtype=torch.float32, device=results[0].device)
    _gradients[(blocks, len(tensors.starts), value_heads)](
        tuple(tensors), (*results, db), scale, tokens, SIZES=(heads, value_heads, key_dim, value_dim),
        BLOCKS=(chunk, width, height), HAS_DV=has_dv, VALUES_FIRST=values_first, num_warps=WARPS, num_stages=2,
    )  # fmt: skip
    return *results, db.sum(0)
