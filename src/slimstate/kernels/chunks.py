"""Tokens by chunks, and the products of small matrices that the chunked recurrences are made of.

B batch, T time, H heads, N chunks of C tokens, D channels. Chunks come first, so that those of one time lie together:
[N, B H, C, D], or as one batch of matrices [N B H, C, D].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, D] to [N, B H, C, D]; the zeros that fill the last chunk leave the state as it is."""
    missing = -x.shape[1] % chunk
    x = F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
    return x.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()


def in_time(x: Tensor, batch: int, time: int) -> Tensor:
    """[N, B H, C, D] back to [B, T, H, D]."""
    return x.unflatten(1, (batch, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :time]


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b for every matrix [M, ., .]; a transposed view is copied first, since some libraries are slow at those."""
    return torch.bmm(a.contiguous(), b.contiguous())


def lower(size: int, diagonal: int, device: torch.device) -> Tensor:
    """Where a row meets a column that is no later, or earlier by one token for each step of `diagonal` below 0."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril(diagonal)


def sum_to_end(x: Tensor) -> Tensor:
    """For every token of [..., C, D] the sum of its chunk from there on."""
    return x.sum(-2, keepdim=True) - x.cumsum(-2) + x
