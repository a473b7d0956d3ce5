"""What fla's models have around their mixers: norms, activations and gated MLPs, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.kernels.fla_calls import wide
from slimstate.kernels.patches import Backend, Patch, in_place_of

ACTIVATIONS = "fla.modules.activations.ops"


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


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """The norm of each group of channels; of one group it is a layer norm."""
    total = wide(x) if residual is None else wide(x) + residual
    groups = total.unflatten(-1, (num_groups, -1))
    norm = F.rms_norm if is_rms_norm else F.layer_norm
    y = norm(groups, groups.shape[-1:], eps=eps).flatten(-2)
    y = y if weight is None else y * weight
    y = (y if bias is None else y + bias).to(x.dtype)
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


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def squared_relu_backward(g: Tensor, x: Tensor) -> Tensor:
    return 2 * g * F.relu(x)


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


def _activation(name: str, activation: Callable[[Tensor], Tensor]) -> tuple[Backend, Backend]:
    forward, backward = both_ways(activation)
    return Backend(f"{ACTIVATIONS}.{name}_fwd", forward), Backend(f"{ACTIVATIONS}.{name}_bwd", backward)


PATCHES = (
    Patch("fla.modules.norm.layernorm.rms_norm", rms_norm),
    *in_place_of("fla.modules.norm.layernorm", ("layer_norm", "group_norm"), group_norm),
    Patch("fla.modules.norm.fused_norm_gate.rms_norm_gated", rms_norm_gated),
    *_activation("sigmoid", torch.sigmoid),
    *_activation("swish", F.silu),
    *_activation("elu_p1", elu_plus_one),
    Patch(f"{ACTIVATIONS}.sqrelu_fwd", squared_relu),
    Patch(f"{ACTIVATIONS}.sqrelu_bwd", squared_relu_backward),
    Patch("fla.modules.mlp.swiglu", swiglu),
    Patch("fla.modules.mlp.powglu", powglu),
    Backend(f"{ACTIVATIONS}.swiglu_linear", swiglu_linear),
    Backend(f"{ACTIVATIONS}.powglu_linear", powglu_linear),
    Patch("fla.modules.FusedCrossEntropyLoss.forward", cross_entropy),
    Patch("fla.modules.fused_linear_cross_entropy.ops.fused_linear_cross_entropy_loss", linear_cross_entropy),
)
