"""The softmax attention of fla's hybrid models with rotary embeddings, and attention residuals.

B batch, T time, H heads, D channels. With `cu_seqlens` N sequences lie end to end in a batch of one.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.kernels.patches import Backend, Patch


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    interleaved: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Rotate the first 2R of [B, T, H, D] by tables [positions, R]; the backward pass is the conjugate rotation."""
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).view(-1, 1)
    positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    if cu_seqlens is not None:
        sequence = torch.repeat_interleave(cu_seqlens.diff())
        positions = positions - cu_seqlens[sequence].unsqueeze(0)
        offsets = offsets[sequence].view(1, -1) if len(offsets) > 1 else offsets
    positions = positions + offsets
    c, s = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2) * (-1 if options.get("conjugate") else 1)
    size = cos.shape[-1]
    rotated, rest = x[..., : 2 * size], x[..., 2 * size :]
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    pair = (a * c - b * s, a * s + b * c)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    y = torch.cat([rotated, rest], dim=-1).to(x.dtype)
    return x.copy_(y) if options.get("inplace") else y


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: tuple[int, int] = (-1, -1), **_: Any
) -> Tensor:
    """Compute flash_attn_func: [B, T, H, D], the last query aligned with the last key."""
    rows = torch.arange(q.shape[1], device=q.device).unsqueeze(1) + k.shape[1] - q.shape[1]
    columns = torch.arange(k.shape[1], device=q.device)
    mask = columns <= rows if causal else torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    if window_size[0] >= 0:
        mask = mask & (columns >= rows - window_size[0])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Compute flash_attn_varlen_func: sequences end to end [total, H, D]."""
    spans = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    parts = [attention(q[None, a:b], k[None, c:d], v[None, c:d], **options).squeeze(0) for (a, b), (c, d) in spans]
    return torch.cat(parts)


def attention_residuals(*args: Any, checkpoint_level: int = 1, **kwargs: Any) -> Any:
    """Compute fused_attnres by fla's own form of it in PyTorch."""
    from fla.ops.attnres.naive import naive_attnres

    return naive_attnres(*args, **kwargs)


PATCHES = (  # functions of flash_attn are None where it is not installed; then these run on every device
    Backend("fla.modules.rotary.ops.rotary_embedding_fwdbwd", rotary),
    Patch("fla.layers.attn.flash_attn_func", attention),
    Patch("fla.layers.attn.flash_attn_varlen_func", packed_attention),
    Backend("fla.ops.attnres.fused_attnres", attention_residuals, operation="attnres"),
)
