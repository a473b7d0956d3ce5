"""Divide tokens into chunks, and multiply and invert the small matrices of chunked recurrences.

B batch, T time, H heads, N chunks of C tokens, D channels. The axis of chunks is the first: [N, B H, C, D], or as one
batch of matrices [N B H, C, D].
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def split_time(x: Tensor, chunk: int) -> Tensor:
    """View [B, T, ...] as [B, N, C, ...]; the last chunk is filled with zeros, which do not change the state."""
    missing = -x.shape[1] % chunk
    x = F.pad(x, (*[0, 0] * (x.ndim - 2), 0, missing)) if missing else x
    return x.unflatten(1, (-1, chunk))


def chunk_views(x: Tensor, chunk: int) -> Tensor:
    """View [B, T, H, D] as [N, B, H, C, D]."""
    return split_time(x, chunk).permute(1, 0, 3, 2, 4)


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """Return [B, T, H, D] as [N, B H, C, D]."""
    return chunk_views(x, chunk).flatten(1, 2).contiguous()


def write_chunks(into: Tensor, x: Tensor) -> None:
    """Write [N, B H, C, D] to a tensor [B, T, H, D]."""
    batch, time, chunk = *into.shape[:2], x.shape[2]
    x, full = x.unflatten(1, (batch, -1)), time // chunk
    if full:
        chunk_views(into[:, : full * chunk], chunk).copy_(x[:full])
    if full * chunk < time:
        into[:, full * chunk :] = x[full, :, :, : time - full * chunk].transpose(1, 2)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b for every matrix [M, ., .]; a transposed b is copied, because some libraries are slow with views."""
    return torch.bmm(a, b.contiguous())


def lower(size: int, diagonal: int, device: torch.device) -> Tensor:
    """Return a mask of the columns up to the row, or with a negative diagonal that many tokens earlier."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril(diagonal)


def inverse_of_unit_lower(x: Tensor) -> Tensor:
    """Return the inverse of I + x for every strictly lower triangular x [M, C, C]."""
    one = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    if x.device.type == "cpu":
        # from the right, because the rows of x are contiguous
        return torch.linalg.solve_triangular(x, one.expand_as(x), upper=False, unitriangular=True, left=False)
    return inverse_by_halves(x)


def inverse_by_halves(x: Tensor) -> Tensor:
    """Return the inverse of I + x by matrix products, faster on a GPU than many small triangular systems.

    With A and B the inverses of two blocks on the diagonal, that of both is [[A, 0], [-B x_BA A, B]]: one step for all
    pairs of blocks of a size.
    """
    size = x.shape[-1]
    place = torch.arange(size, device=x.device)
    inverse, half = torch.eye(size, dtype=x.dtype, device=x.device).expand_as(x), 1
    while half < size:
        block = place // half
        joins = (block[:, None] == block + 1) & (block % 2 == 0)
        inverse = torch.baddbmm(inverse, torch.bmm(inverse, x * joins), inverse, alpha=-1)
        half *= 2
    return inverse
