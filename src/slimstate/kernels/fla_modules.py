"""PyTorch in place of flash-linear-attention's Triton kernels, wherever Triton cannot run.

`install` puts them in: through fla's backend registry where a whole differentiable operation has an entry point there,
by substitution of the function elsewhere. What only the layers of a family call, that family brings (`SUBSTITUTES`).
Each stands aside for CUDA tensors that fla's own kernels take, so a model on a GPU is not touched. The model classes
stay fla's.

B batch, T time, D channels, W taps of a convolution. With `cu_seqlens` N sequences lie end to end in a batch of one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.core.layout import HookPoint
from slimstate.families import FAMILIES
from slimstate.families.contract import BringsSubstitutes
from slimstate.kernels.fla_rules import Packing, gated_delta_rule, wide
from slimstate.kernels.patches import needs_torch_gated_rule, on_cpu


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution of [B, T, D] by [D, W]; states [N, D, W] are the last W inputs."""
    packing = None if cu_seqlens is None else Packing(cu_seqlens)
    inputs = x if packing is None else packing.pad(x)
    batch, time, _channels = inputs.shape
    taps = weight.shape[-1]
    past = inputs.new_zeros(batch, taps, inputs.shape[-1]) if initial_state is None else initial_state.mT.to(inputs)
    whole = torch.cat([past, inputs], dim=1)
    kernel, shifted = wide(weight), wide(whole)
    y = shifted[:, 1 : time + 1] * kernel[:, 0]
    for tap in range(1, taps):
        y = torch.addcmul(y, shifted[:, tap + 1 : tap + 1 + time], kernel[:, tap])
    y = y if bias is None else y + bias
    y = (F.silu(y) if activation in ("silu", "swish") else y).to(x.dtype)
    y = y if packing is None else packing.pack(y)
    y = y if residual is None else y + residual
    if not output_final_state:
        return y, None
    lengths = torch.full((batch,), time, device=x.device) if packing is None else packing.lengths
    last = lengths.view(-1, 1, 1) + torch.arange(taps, device=x.device).view(1, -1, 1)
    return y, whole.gather(1, last.expand(-1, -1, whole.shape[-1])).mT.contiguous()


def convolution_step(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token for each of N sequences; the cache [N, D, W] is updated in place."""
    assert weight is not None
    rolled = torch.cat([cache[..., 1:], x.reshape(cache.shape[0], -1, 1).to(cache.dtype)], dim=-1)
    cache.copy_(rolled)
    y = (wide(rolled) * wide(weight)).sum(-1)
    y = y if bias is None else y + bias
    y = (F.silu(y) if activation in ("silu", "swish") else y).to(x.dtype).view_as(x)
    return (y if residual is None else y + residual), cache


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    total = wide(x) if residual is None else wide(x) + residual
    y = F.rms_norm(total, x.shape[-1:], None if weight is None else weight.to(total), eps)
    y = (y if bias is None else y + bias).to(x.dtype)
    return (y, total if residual_in_fp32 else total.to(x.dtype)) if prenorm else y


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    total = wide(x) if residual is None else wide(x) + residual
    y = rms_norm(total, weight, bias, eps=eps)
    assert isinstance(y, Tensor)
    gate = wide(g).sigmoid() if activation == "sigmoid" else F.silu(wide(g))
    y = (y * gate).to(x.dtype)
    return (y, total if residual_in_fp32 else total.to(x.dtype)) if prenorm else y


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(swiglu(x, y), weight, bias)


def powglu(x: Tensor, y: Tensor, power: float = 3.0) -> Tensor:
    positive = torch.where(x > 0, x, torch.ones_like(x))
    grown = positive ** (power / (positive.sqrt() + 1))
    return torch.where(x > 0, grown, x) * x.sigmoid() * y


def powglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, power: float = 3.0) -> Tensor:
    return F.linear(powglu(x, y, power), weight, bias)


def elu_plus_one(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def both_ways(activation: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """An activation and its backward pass, as fla calls them."""

    def forward(x: Tensor, **_: Any) -> Tensor:
        return activation(x)

    def backward(x: Tensor, dy: Tensor, **_: Any) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_(True)
            (gradient,) = torch.autograd.grad(activation(point), point, dy)
        return gradient

    return forward, backward


def cross_entropy(criterion: Any, logits: Tensor, target: Tensor) -> Tensor:
    """The forward of fla's FusedCrossEntropyLoss, for the options its language models use."""
    if criterion.lse_square_scale or criterion.return_z_loss or criterion.process_group is not None:
        raise NotImplementedError("z-loss and sharded vocabularies need fla's Triton kernels")
    logits = wide(logits) * criterion.logit_scale
    if criterion.logit_softcapping is not None:
        logits = criterion.logit_softcapping * torch.tanh(logits / criterion.logit_softcapping)
    return F.cross_entropy(
        logits,
        target,
        ignore_index=criterion.ignore_index,
        reduction=criterion.reduction,
        label_smoothing=criterion.label_smoothing,
    )


def linear_cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    **_: Any,
) -> Tensor:
    from fla.modules.l2warp import l2_warp

    logits = wide(F.linear(x, weight, bias)) * logit_scale
    loss = F.cross_entropy(
        logits, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return l2_warp(loss, logits.unsqueeze(0), l2_penalty_factor) if use_l2warp else loss


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Rotate the first 2R of [B, T, H, D] by tables [positions, R]; backwards is the conjugate rotation."""
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).view(-1, 1)
    positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    if cu_seqlens is not None:
        sequence = torch.repeat_interleave(cu_seqlens.diff())
        positions = positions - cu_seqlens[sequence].unsqueeze(0)
        offsets = offsets[sequence].view(1, -1) if len(offsets) > 1 else offsets
    positions = positions + offsets
    c, s = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2) * (-1 if conjugate else 1)
    size = cos.shape[-1]
    turned, rest = x[..., : 2 * size], x[..., 2 * size :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    y = torch.cat([turned, rest], dim=-1).to(x.dtype)
    return x.copy_(y) if inplace else y


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: tuple[int, int] = (-1, -1), **_: Any
) -> Tensor:
    """flash_attn_func: [B, T, H, D], the last query aligned with the last key."""
    rows = torch.arange(q.shape[1], device=q.device).unsqueeze(1) + k.shape[1] - q.shape[1]
    columns = torch.arange(k.shape[1], device=q.device)
    seen = columns <= rows if causal else torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    if window_size[0] >= 0:
        seen = seen & (columns >= rows - window_size[0])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> Tensor:
    """flash_attn_varlen_func: sequences end to end [total, H, D]."""
    spans = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    parts = [attention(q[None, a:b], k[None, c:d], v[None, c:d], **options).squeeze(0) for (a, b), (c, d) in spans]
    return torch.cat(parts)


def _substitute(owner: Any, name: str, version: Callable[..., Any], when: Callable[..., bool] = on_cpu) -> None:
    original = getattr(owner, name, None)

    @functools.wraps(version)
    def routed(*args: Any, **kwargs: Any) -> Any:
        chosen = version if original is None or when(*args, **kwargs) else original
        return chosen(*args, **kwargs)

    setattr(owner, name, routed)


@functools.cache
def use_reference(hook: HookPoint) -> None:
    """Make the functions of a transformers module run their own PyTorch form wherever compiled ones cannot run.

    Transformers chooses compiled kernels when it is imported, by what is installed and not by where the tensors are.
    Once a process.
    """
    module = importlib.import_module(hook.module)
    step = () if hook.step is None else (hook.step,)
    for name in (*hook.operators, *step, *hook.kernels):
        chosen = getattr(module, name)
        reference = inspect.unwrap(chosen)
        if reference is not chosen:
            _substitute(module, name, reference, needs_torch_gated_rule if "gated_delta_rule" in name else on_cpu)
    for name in hook.shortcuts:
        _substitute(module, name, inspect.unwrap(getattr(module, name)), lambda *_, **__: True)


@functools.cache
def install() -> None:
    """Make fla's models run wherever PyTorch runs. Once a process; a second call does nothing."""
    import fla.layers.attn
    import fla.layers.gated_deltanet
    import fla.modules.causal_conv1d.ops
    import fla.modules.fused_linear_cross_entropy.ops
    import fla.modules.mlp
    import fla.modules.norm.fused_norm_gate
    import fla.modules.norm.layernorm
    from fla.backends import BaseBackend, register
    from fla.modules import FusedCrossEntropyLoss
    from fla.modules.activations import ops as activations
    from fla.modules.rotary import ops as rotary_ops
    from fla.ops.attnres.naive import naive_attnres

    class TorchBackend(BaseBackend):  # type: ignore[misc]
        backend_type = "slimstate_torch"
        priority = -1

    def accepts(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        return on_cpu(*args, **kwargs), "not a CPU tensor"

    whole = {
        activations.swiglu_linear: swiglu_linear,
        activations.powglu_linear: powglu_linear,
        rotary_ops.rotary_embedding_fwdbwd: rotary,
        fla.modules.causal_conv1d.ops.causal_conv1d_update: convolution_step,
    }
    for name, activation in (("sigmoid", torch.sigmoid), ("swish", F.silu), ("elu_p1", elu_plus_one)):
        forward, backward = both_ways(activation)
        whole |= {getattr(activations, f"{name}_fwd"): forward, getattr(activations, f"{name}_bwd"): backward}
    for entry_point, version in whole.items():
        register(entry_point, backend=TorchBackend, verifier=accepts)(version)

    @register("gated_delta_rule")
    class GatedRule(TorchBackend):
        chunk_gated_delta_rule = staticmethod(gated_delta_rule)

        @staticmethod
        def chunk_gated_delta_rule_verifier(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return needs_torch_gated_rule(*args, **kwargs), "fla's own kernels run"

    @register("attnres")
    class AttentionResiduals(TorchBackend):
        @staticmethod
        def fused_attnres(*args: Any, checkpoint_level: int = 1, **kwargs: Any) -> Any:
            return naive_attnres(*args, **kwargs)

        fused_attnres_verifier = staticmethod(accepts)

    for family in FAMILIES.values():
        for item in family.SUBSTITUTES if isinstance(family, BringsSubstitutes) else ():
            place, _, name = item.place.rpartition(".")
            _substitute(importlib.import_module(place), name, item.version, item.when)
    for module in (fla.layers.gated_deltanet, fla.modules.causal_conv1d.ops):
        _substitute(module, "causal_conv1d", short_convolution)
    _substitute(fla.modules.norm.layernorm, "rms_norm", rms_norm)
    _substitute(fla.modules.norm.fused_norm_gate, "rms_norm_gated", rms_norm_gated)
    _substitute(fla.modules.mlp, "swiglu", swiglu)
    _substitute(fla.modules.mlp, "powglu", powglu)
    _substitute(FusedCrossEntropyLoss, "forward", cross_entropy)
    _substitute(fla.modules.fused_linear_cross_entropy.ops, "fused_linear_cross_entropy_loss", linear_cross_entropy)
    # None where flash-attn is not installed; then these run on every device
    for name, version in (("flash_attn_func", attention), ("flash_attn_varlen_func", packed_attention)):
        _substitute(fla.layers.attn, name, version)
