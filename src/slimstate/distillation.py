"""Cross entropy plus distillation, a few tokens at a time: no tensor of all tokens by the vocabulary ever exists.

The loss of a token with logits z, target y and the teacher's distribution p at temperature T is

    -log softmax(z)_y + weight T^2 KL(p || softmax(z / T)),

averaged over tokens. The gradient by the hidden states is taken chunk by chunk in the forward pass; only it is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_AT_ONCE = 2**24  # elements of one chunk of logits; about ten tensors of that size are alive together


class Opinion(Protocol):
    """What a teacher thinks comes after each of N tokens."""

    def divergence(self, rows: slice, logits: Tensor, temperature: float) -> Tensor:
        """The sum of KL(teacher || student) at the temperature over the tokens `rows`, of student logits [n, V]."""


@dataclass(frozen=True, kw_only=True)
class WholeOpinion:
    """A teacher's hidden states [N, D] and its output head [V, D]: its logits are made when they are looked at."""

    hidden: Tensor
    head: Tensor

    def log_probs(self, rows: slice, temperature: float) -> Tensor:
        """Of all tokens [n, V] at the temperature."""
        return (self.hidden[rows] @ self.head.mT).float().div_(temperature).log_softmax(-1)

    def divergence(self, rows: slice, logits: Tensor, temperature: float) -> Tensor:
        ours = (logits / temperature).log_softmax(-1)
        return F.kl_div(ours, self.log_probs(rows, temperature), reduction="sum", log_target=True)


@dataclass(frozen=True, kw_only=True)
class TopOpinion:
    """The log probabilities [N, k] of a teacher's k best tokens `ids` [N, k], at the temperature they were taken at.

    All other tokens (k < V) count as one, with the probability that is left: a lower bound of the whole divergence.
    """

    ids: Tensor
    log_probs: Tensor

    def divergence(self, rows: slice, logits: Tensor, temperature: float) -> Tensor:
        theirs, ids = self.log_probs[rows].float(), self.ids[rows].long()
        ours = (logits / temperature).log_softmax(-1)
        # summed, not 1 minus the best: a student may be all but sure of them and must still learn of the others
        rest = ours.scatter(-1, ids, -math.inf).logsumexp(-1)
        best = F.kl_div(ours.gather(-1, ids), theirs, reduction="sum", log_target=True)
        return best + F.kl_div(rest, log_rest(theirs), reduction="sum", log_target=True)


def log_rest(log_probs: Tensor) -> Tensor:
    """The logarithm of what `log_probs` [N, k] leave of a probability of 1."""
    return torch.log1p(-log_probs.exp().sum(-1).clamp(max=1 - 1e-6))


def distilled_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    opinion: Opinion | None = None,
    *,
    temperature: float = 2.0,
    weight: float = 1.0,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss over N tokens, and its two parts for the record: cross entropy, and T^2 KL before its weight.

    hidden [N, D] and head [V, D] of the student, targets [N].
    """
    options = (opinion, temperature, weight, max(1, logits_at_once // len(head)))
    loss, cross_entropy, distillation = _ChunkedLoss.apply(hidden, head, targets, *options)
    return loss, cross_entropy, distillation


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        opinion: Opinion | None,
        temperature: float,
        weight: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = ctx.needs_input_grad[:2]
        kind = hidden.device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.dtype
        weights = head.detach().to(compute).requires_grad_(wanted[1])
        by_hidden = torch.empty_like(hidden) if wanted[0] else None
        by_head = torch.zeros_like(head, dtype=torch.float32) if wanted[1] else None
        sums = torch.zeros(2, device=hidden.device)
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(hidden), chunk):
                rows = slice(start, start + chunk)
                with torch.set_grad_enabled(any(wanted)):
                    states = hidden[rows].detach().to(compute).requires_grad_(wanted[0])
                    logits = F.linear(states, weights).float()
                    parts = [F.cross_entropy(logits, targets[rows], reduction="sum")]
                    if opinion is not None:
                        parts.append(temperature**2 * opinion.divergence(rows, logits, temperature))
                    loss = parts[0] if opinion is None else parts[0] + weight * parts[1]
                    inputs = [tensor for tensor, need in zip((states, weights), wanted, strict=True) if need]
                    gradients = iter(torch.autograd.grad(loss, inputs) if inputs else ())
                for index, part in enumerate(parts):
                    sums[index] += part.detach()
                if by_hidden is not None:
                    by_hidden[rows] = next(gradients) / len(hidden)
                if by_head is not None:
                    by_head += next(gradients) / len(hidden)
        ctx.by_hidden, ctx.by_head, ctx.head_dtype = by_hidden, by_head, head.dtype
        cross_entropy, distillation = sums[0] / len(hidden), sums[1] / len(hidden)
        ctx.mark_non_differentiable(cross_entropy, distillation)
        return cross_entropy + weight * distillation, cross_entropy, distillation

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, ...]:
        by_hidden = None if ctx.by_hidden is None else ctx.by_hidden * outer[0]
        by_head = None if ctx.by_head is None else (ctx.by_head * outer[0]).to(ctx.head_dtype)
        return by_hidden, by_head, *[None] * 5
