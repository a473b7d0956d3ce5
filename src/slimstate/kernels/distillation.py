"""Cross entropy plus distillation, a few tokens at a time: no tensor of all tokens by the vocabulary is ever allocated.

The loss of a token with logits z, target y and the teacher's distribution p at temperature T is

    -log softmax(z)_y + weight T^2 KL(p || softmax(z / T)),

averaged over tokens. The gradient of the hidden states is computed chunk by chunk in the forward pass, and only that is
stored. On a GPU one kernel processes the logits of a chunk (`distillation_triton`).
"""

import math
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slimstate.system.value import Value

LOGITS_AT_ONCE = 2**24  # elements of a chunk of logits; about ten tensors of that size exist at once


class FullDistribution(Value):
    """A teacher's hidden states [N, D] and its output head [V, D]; logits are computed when they are needed."""

    hidden: Tensor
    head: Tensor

    def logits(self, rows: slice) -> Tensor:
        return self.hidden[rows] @ self.head.mT

    def log_probs(self, rows: slice, temperature: float) -> Tensor:
        """Return the log probabilities of all tokens [n, V] at the temperature."""
        return self.logits(rows).float().div_(temperature).log_softmax(-1)

    def divergence(self, rows: slice, logits: Tensor, temperature: float) -> Tensor:
        """Return the sum of KL(teacher || student) over the tokens `rows`, for student logits [n, V]."""
        ours = (logits / temperature).log_softmax(-1)
        return F.kl_div(ours, self.log_probs(rows, temperature), reduction="sum", log_target=True)


class TopDistribution(Value):
    """The log probabilities [N, k] of a teacher's k best tokens `ids` [N, k], at a fixed temperature.

    All other tokens (k < V) count as one with the remaining probability: a lower bound of the full divergence.
    """

    ids: Tensor
    log_probs: Tensor

    def divergence(self, rows: slice, logits: Tensor, temperature: float) -> Tensor:
        theirs, ids = self.log_probs[rows].float(), self.ids[rows].long()
        ours = (logits / temperature).log_softmax(-1)
        # summed, not 1 minus the best: a student that is almost sure of them must still learn from the others
        rest = ours.scatter(-1, ids, -math.inf).logsumexp(-1)
        best = F.kl_div(ours.gather(-1, ids), theirs, reduction="sum", log_target=True)
        their_rest = torch.log1p(-theirs.exp().sum(-1).clamp(max=1 - 1e-6))
        return best + F.kl_div(rest, their_rest, reduction="sum", log_target=True)


TeacherDistribution: TypeAlias = FullDistribution | TopDistribution


def distilled_loss(
    hidden: Tensor, head: Tensor, targets: Tensor, teacher: TeacherDistribution | None = None,
    *, temperature: float = 2.0, weight: float = 1.0, logits_at_once: int = LOGITS_AT_ONCE,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the mean loss over N tokens, and its parts: cross entropy, and T^2 KL without its weight.

    hidden [N, D] and head [V, D] of the student, targets [N].
    """
    options = (teacher, temperature, weight, max(1, logits_at_once // len(head)))
    return _ChunkedLoss.apply(hidden, head, targets, *options)  # type: ignore[no-untyped-call]


def _in_pytorch(
    logits: Tensor, targets: Tensor, teacher: TeacherDistribution | None, rows: slice, temperature: float, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of both parts over the tokens `rows`, and the gradient of the student logits [n, V]."""
    with torch.enable_grad():
        variable = logits.float().requires_grad_()
        cross_entropy = F.cross_entropy(variable, targets[rows], reduction="sum")
        divergence = torch.zeros_like(cross_entropy)
        if teacher is not None:
            divergence = teacher.divergence(rows, variable, temperature)
        loss = cross_entropy + weight * temperature**2 * divergence
        (gradient,) = torch.autograd.grad(loss, variable)
    return cross_entropy.detach(), divergence.detach(), gradient.to(logits.dtype)


def _in_one_kernel(
    logits: Tensor, targets: Tensor, teacher: FullDistribution | None, rows: slice, temperature: float, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `_in_pytorch`, from one Triton kernel; the gradient overwrites the logits."""
    from slimstate.kernels.distillation_triton import losses_

    theirs = None if teacher is None else teacher.logits(rows)
    cross_entropy, divergence = losses_(logits, theirs, targets[rows], temperature=temperature, weight=weight)
    return cross_entropy.sum(), divergence.sum(), logits


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, teacher: TeacherDistribution | None,
        temperature: float, weight: float, chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        needs_grad = ctx.needs_input_grad[:2]
        kind = hidden.device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.dtype
        weights = head.detach().to(compute)
        by_hidden = torch.empty_like(hidden) if needs_grad[0] else None
        by_head = torch.zeros_like(head, dtype=torch.float32) if needs_grad[1] else None
        sums = torch.zeros(2, device=hidden.device)
        has_kernel = hidden.is_cuda and (teacher is None or isinstance(teacher, FullDistribution))
        losses: Any = _in_one_kernel if has_kernel else _in_pytorch
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(hidden), chunk):
                rows = slice(start, start + chunk)
                states = hidden[rows].detach().to(compute)
                *parts, by_logits = losses(F.linear(states, weights), targets, teacher, rows, temperature, weight)
                sums += torch.stack(parts)
                if by_hidden is not None:
                    by_hidden[rows] = by_logits @ weights
                if by_head is not None:
                    by_head += by_logits.mT @ states
        ctx.by_hidden, ctx.by_head, ctx.head_dtype, ctx.tokens = by_hidden, by_head, head.dtype, len(hidden)
        cross_entropy, distillation = sums[0] / len(hidden), temperature**2 * sums[1] / len(hidden)
        ctx.mark_non_differentiable(cross_entropy, distillation)
        return cross_entropy + weight * distillation, cross_entropy, distillation

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, ...]:
        share = outer[0] / ctx.tokens  # the gradients above are of a sum: half precision would lose those of a mean
        by_hidden = None if ctx.by_hidden is None else ctx.by_hidden * share
        by_head = None if ctx.by_head is None else (ctx.by_head * share).to(ctx.head_dtype)
        return by_hidden, by_head, *[None] * 5
