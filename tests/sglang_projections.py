"""SGLang's kernels that take queries, keys and values out of what the projections give, beside plain PyTorch.

Qwen3-Next's projections lie by key head, and one kernel splits them for prefill and decoding. Qwen3.5's lie one after
the other: with CUDA a prefill needs views alone, and a decoding step is split and convolved at once; elsewhere a kernel
splits them. B tokens, H key heads, G value heads, K key dim, V value dim.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

B, H, G, V, TAPS = 3, 2, 4, 32, 4


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def largest(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((x.reshape(ours.shape) - ours).abs().max() / ours.std()) for x, ours in pairs)


def by_key_head(module: ModuleType, key_dim: int) -> float:
    qkvz, ba = drawn(B, H, 2 * key_dim + 2 * G // H * V), drawn(B, H, 2 * G // H)
    found = module.fused_qkvzba_split_reshape_cat(qkvz.flatten(1), ba.flatten(1), H, G, key_dim, V)
    q, k, v, z = (x.flatten(1) for x in qkvz.split([key_dim, key_dim, G // H * V, G // H * V], -1))
    b, a = (x.flatten(1) for x in ba.chunk(2, -1))
    return largest(found, (torch.cat([q, k, v], -1), z, b, a))


def one_after_the_other(key_dim: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """What the projections give, and its parts: queries, keys and values together, the gate, and the rest."""
    width = 2 * H * key_dim + G * V
    qkvz, ba = drawn(B, width + G * V), drawn(B, 2 * G)
    return qkvz, ba, (qkvz[:, :width], qkvz[:, width:], ba[:, :G], ba[:, G:])


def split(module: ModuleType, key_dim: int) -> float:
    qkvz, ba, expected = one_after_the_other(key_dim)
    return largest(module.fused_qkvzba_split_reshape_cat_contiguous(qkvz, ba, H, G, key_dim, V), expected)


def split_and_convolved(module: ModuleType, key_dim: int) -> float:
    """One token each; the states of the convolution go on in place."""
    module.can_use_fused_qkvzba_causal_conv1d_update_contiguous = lambda *_, **__: (True, "")  # it asks for CUDA
    qkvz, ba, (qkv, *rest) = one_after_the_other(key_dim)
    width = qkv.shape[1]
    state, weight, slots = drawn(B + 1, width, TAPS - 1), drawn(width, TAPS), torch.arange(1, B + 1)
    seen = torch.cat([state[1:], qkv.unsqueeze(-1)], -1)
    expected = (F.silu((seen * weight).sum(-1)), *rest, seen[..., 1:])
    found = module.fused_qkvzba_causal_conv1d_update_contiguous(
        qkvz, ba, state, weight, None, slots,
        qkv_dim=width, v_dim=G * V, num_v_heads=G, head_v_dim=V, activation="silu",
    )  # fmt: skip
    return largest((*found, state[1:]), expected)


def split_after_convolution(module: ModuleType, key_dim: int) -> float:
    qkv = one_after_the_other(key_dim)[2][0]
    found = module.fused_qkv_split_gdn_prefill(qkv, H, H, G, key_dim, key_dim, V)
    return largest(found, qkv.split([H * key_dim, H * key_dim, G * V], -1))


DIFFERENCES = {
    "Qwen3-Next projections": by_key_head,
    "Qwen3.5 projections, decode with CUDA": split_and_convolved,
    "Qwen3.5 projections, elsewhere": split,
    "queries, keys and values, prefill": split_after_convolution,
}
