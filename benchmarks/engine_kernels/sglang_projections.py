"""Compare SGLang's kernels that split the projections into queries, keys and values with plain PyTorch.

Qwen3-Next's projections are interleaved by key head, and one kernel splits them for prefill and decoding. Qwen3.5's are
concatenated: with CUDA a prefill needs only views, and one kernel splits and convolves a decoding step; elsewhere a
kernel splits them. B tokens, H key heads, G value heads, K key dim, V value dim.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

B, H, G, V, TAPS = 3, 2, 4, 32, 4


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def largest(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(float((x.reshape(ours.shape) - ours).abs().max() / ours.std()) for x, ours in pairs)


def split_interleaved(module: ModuleType, key_dim: int) -> float:
    qkvz, ba = normal(B, H, 2 * key_dim + 2 * G // H * V), normal(B, H, 2 * G // H)
    output = module.fused_qkvzba_split_reshape_cat(qkvz.flatten(1), ba.flatten(1), H, G, key_dim, V)
    q, k, v, z = (x.flatten(1) for x in qkvz.split([key_dim, key_dim, G // H * V, G // H * V], -1))
    b, a = (x.flatten(1) for x in ba.chunk(2, -1))
    return largest(output, (torch.cat([q, k, v], -1), z, b, a))


def concatenated(key_dim: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the two projections and their parts: queries, keys and values together, the gate, and the rest."""
    width = 2 * H * key_dim + G * V
    qkvz, ba = normal(B, width + G * V), normal(B, 2 * G)
    return qkvz, ba, (qkvz[:, :width], qkvz[:, width:], ba[:, :G], ba[:, G:])


def split(module: ModuleType, key_dim: int) -> float:
    qkvz, ba, expected = concatenated(key_dim)
    return largest(module.fused_qkvzba_split_reshape_cat_contiguous(qkvz, ba, H, G, key_dim, V), expected)


def split_and_convolve(module: ModuleType, key_dim: int) -> float:
    """Split and convolve one token each; the states of the convolution are updated in place."""
    module.can_use_fused_qkvzba_causal_conv1d_update_contiguous = lambda *_, **__: (True, "")  # it checks for CUDA
    qkvz, ba, (qkv, *rest) = concatenated(key_dim)
    width = qkv.shape[1]
    state, weight, slots = normal(B + 1, width, TAPS - 1), normal(width, TAPS), torch.arange(1, B + 1)
    window = torch.cat([state[1:], qkv.unsqueeze(-1)], -1)
    expected = (F.silu((window * weight).sum(-1)), *rest, window[..., 1:])
    output = module.fused_qkvzba_causal_conv1d_update_contiguous(
        qkvz, ba, state, weight, None, slots,
        qkv_dim=width, v_dim=G * V, num_v_heads=G, head_v_dim=V, activation="silu",
    )  # fmt: skip
    return largest((*output, state[1:]), expected)


def split_after_convolution(module: ModuleType, key_dim: int) -> float:
    qkv = concatenated(key_dim)[2][0]
    output = module.fused_qkv_split_gdn_prefill(qkv, H, H, G, key_dim, key_dim, V)
    return largest(output, qkv.split([H * key_dim, H * key_dim, G * V], -1))


DIFFERENCES = {
    "Qwen3-Next projections": split_interleaved,
    "Qwen3.5 projections, decode with CUDA": split_and_convolve,
    "Qwen3.5 projections, elsewhere": split,
    "queries, keys and values, prefill": split_after_convolution,
}
