"""Tokens by chunks, and the products of small matrices that the chunked recurrences are made of.

B batch, T time, H heads, N chunks of C tokens, D channels. Chunks come first, so that those of one time lie together:
[N, B H, C, D], or as one batch of matrices [N B H, C, D].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def chunk_views(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, D] as [N, B, H, C, D]; the zeros that fill the last chunk leave the state as it is."""
    missing = -x.shape[1] % chunk
    x = F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
    return x.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4)


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, D] to [N, B H, C, D]."""
    return chunk_views(x, chunk).flatten(1, 2).contiguous()


def put_in_time(into: Tensor, x: Tensor) -> None:
    """[N, B H, C, D] back to [B, T, H, D], into a tensor that is there."""
    batch, time, chunk = *into.shape[:2], x.shape[2]
    x, whole = x.unflatten(1, (batch, -1)), time // chunk
    if whole:
        chunk_views(into[:, : whole * chunk], chunk).copy_(x[:whole])
    if whole * chunk < time:
        into[:, whole * chunk :] = x[whole, :, :, : time - whole * chunk].transpose(1, 2)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b for every matrix [M, ., .]; where b is a transposed view, it is copied: some libraries are slow at those."""
    return torch.bmm(a, b.contiguous())


def lower(size: int, diagonal: int, device: torch.device) -> Tensor:
    """Where a row meets a column that is no later, or earlier by one token for each step of `diagonal` below 0."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril(diagonal)


def inverse_of_unit_lower(x: Tensor) -> Tensor:
    """The inverse of I + x for every x [M, C, C] below its diagonal."""
    one = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    if x.device.type == "cpu":
        # from the right: the rows of x lie together
        return torch.linalg.solve_triangular(x, one.expand_as(x), upper=False, unitriangular=True, left=False)
    return inverse_by_halves(x)


def inverse_by_halves(x: Tensor) -> Tensor:
    """By products alone, which a GPU has done long before it has solved as many small systems.

    With A and B the inverses of two blocks on the diagonal, that of both is [[A, 0], [-B x_BA A, B]]: one step for all
    pairs of blocks of a size.
    """
    size = x.shape[-1]
    place = torch.arange(size, device=x.device)
    found, half = torch.eye(size, dtype=x.dtype, device=x.device).expand_as(x), 1
    while half < size:
        block = place // half
        joins = (block[:, None] == block + 1) & (block % 2 == 0)
        found = torch.baddbmm(found, torch.bmm(found, x * joins), found, alpha=-1)
        half *= 2
    return found


def sum_to_end(x: Tensor) -> Tensor:
    """For every token of [..., C, D] the sum of its chunk from there on."""
    return x.sum(-2, keepdim=True) - x.cumsum(-2) + x
