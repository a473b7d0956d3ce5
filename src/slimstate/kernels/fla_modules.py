"""The modules around the mixers of fla's models: norms, activations, gated MLPs and losses."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.kernels.fla_calls import wide
from slimstate.kernels.patches import Backend, Patch, in_place_of

ACTIVATIONS = "fla.modules.activations.ops"
LOSS_OPTIONS = ("ignore_index", "reduction", "label_smoothing")


def _norm(
    norm: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None = None, prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Apply a norm to x plus the residual; `prenorm` also returns that sum."""
    total = wide(x) if residual is None else wide(x) + residual
    y = norm(total).to(x.dtype)
    return (y, total if residual_in_fp32 else total.to(x.dtype)) if prenorm else y


def _rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x), eps)
    return y if bias is None else y + bias


def rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5,
    prenorm: bool = False, residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    return _norm(lambda total: _rms(total, weight, bias, eps), x, residual, prenorm, residual_in_fp32)


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str = "swish", eps: float = 1e-6,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    gate = wide(g).sigmoid() if activation == "sigmoid" else F.silu(wide(g))
    return _norm(lambda total: _rms(total, weight, bias, eps) * gate, x, **options)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5,
    *, is_rms_norm: bool = False, num_groups: int = 1, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Normalise each group of channels; with one group this is a layer norm."""

    def norm(total: Tensor) -> Tensor:
        groups = total.unflatten(-1, (num_groups, -1))
        y = (F.rms_norm if is_rms_norm else F.layer_norm)(groups, groups.shape[-1:], eps=eps).flatten(-2)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    return _norm(norm, x, residual, **options)


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


def _activation(name: str, activation: Callable[[Tensor], Tensor]) -> tuple[Backend, Backend]:
    """Return patches for an activation and its backward pass, as fla calls them."""

    def forward(x: Tensor, **_: Any) -> Tensor:
        return activation(x)

    def backward(x: Tensor, dy: Tensor, **_: Any) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_(True)
            (gradient,) = torch.autograd.grad(activation(point), point, dy)
        return gradient

    return Backend(f"{ACTIVATIONS}.{name}_fwd", forward), Backend(f"{ACTIVATIONS}.{name}_bwd", backward)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def squared_relu_backward(g: Tensor, x: Tensor) -> Tensor:
    return 2 * g * F.relu(x)


def cross_entropy(criterion: Any, logits: Tensor, target: Tensor) -> Tensor:
    """Compute the forward of fla's FusedCrossEntropyLoss, for the options that its language models use."""
    if criterion.lse_square_scale or criterion.return_z_loss or criterion.process_group is not None:
        raise NotImplementedError("z-loss and sharded vocabularies need fla's Triton kernels")
    logits = wide(logits) * criterion.logit_scale
    if criterion.logit_softcapping is not None:
        logits = criterion.logit_softcapping * torch.tanh(logits / criterion.logit_softcapping)
    return F.cross_entropy(logits, target, **{name: getattr(criterion, name) for name in LOSS_OPTIONS})


def linear_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None, *, logit_scale: float = 1.0,
    use_l2warp: bool = False, l2_penalty_factor: float = 1e-4, **options: Any,
) -> Tensor:  # fmt: skip
    from fla.modules.l2warp import l2_warp

    logits = wide(F.linear(x, weight, bias)) * logit_scale
    loss = F.cross_entropy(logits, target, **{name: options[name] for name in LOSS_OPTIONS if name in options})
    return l2_warp(loss, logits.unsqueeze(0), l2_penalty_factor) if use_l2warp else loss


PATCHES = (
    Patch("fla.modules.norm.layernorm.rms_norm", rms_norm),
    *in_place_of("fla.modules.norm.layernorm", ("layer_norm", "group_norm"), group_norm),
    Patch("fla.modules.norm.fused_norm_gate.rms_norm_gated", rms_norm_gated),
    *_activation("sigmoid", torch.sigmoid),
    *_activation("swish", F.silu),
    *_activation("elu_p1", lambda x: F.elu(x) + 1),
    Patch(f"{ACTIVATIONS}.sqrelu_fwd", squared_relu),
    Patch(f"{ACTIVATIONS}.sqrelu_bwd", squared_relu_backward),
    Patch("fla.modules.mlp.swiglu", swiglu),
    Patch("fla.modules.mlp.powglu", powglu),
    Backend(f"{ACTIVATIONS}.swiglu_linear", swiglu_linear),
    Backend(f"{ACTIVATIONS}.powglu_linear", powglu_linear),
    Patch("fla.modules.FusedCrossEntropyLoss.forward", cross_entropy),
    Patch("fla.modules.fused_linear_cross_entropy.ops.fused_linear_cross_entropy_loss", linear_cross_entropy),
)
