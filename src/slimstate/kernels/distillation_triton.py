"""Cross entropy and distillation in one Triton kernel, which overwrites the logits by their gradient.

A chunk of logits is read twice and written once; the same formula in PyTorch passes over it some thirty times.
Importing this module imports triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(4096)


@triton.jit  # type: ignore[untyped-decorator]
def _losses(  # type: ignore[no-untyped-def]
    logits, teacher, targets, losses, vocabulary, beta, weight, HAS_TEACHER: tl.constexpr
):  # fmt: skip
    """Run once for each token. `beta` is 1 / T; `weight` that of the divergence in the gradient of the logits.

    `losses` [2, n] takes the cross entropies and the divergences.

    Triton evaluates annotations, so there are none but its own.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocabulary
    teacher += row.to(tl.int64) * vocabulary
    target = tl.load(targets + row)
    target_logit = tl.load(logits + target).to(tl.float32)
    top, total, warm_total = float("-inf"), 0.0, 0.0
    their_top, their_total = float("-inf"), 0.0
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        ours = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(ours, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(ours - new), 0)
        if HAS_TEACHER:
            warm_total = warm_total * tl.exp((top - new) * beta) + tl.sum(tl.exp((ours - new) * beta), 0)
            theirs = tl.load(teacher + column, mask=inside, other=float("-inf")).to(tl.float32)
            their_new = tl.maximum(their_top, tl.max(theirs, 0))
            their_total = their_total * tl.exp((their_top - their_new) * beta)
            their_total += tl.sum(tl.exp((theirs - their_new) * beta), 0)
            their_top = their_new
        top = new
    norm, divergence = top + tl.log(total), 0.0
    if HAS_TEACHER:
        warm_norm, their_norm = top * beta + tl.log(warm_total), their_top * beta + tl.log(their_total)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        ours = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.exp(ours - norm) - tl.where(column == target, 1.0, 0.0)
        if HAS_TEACHER:
            theirs = tl.load(teacher + column, mask=inside, other=0.0).to(tl.float32) * beta - their_norm
            warm = ours * beta - warm_norm
            divergence += tl.sum(tl.where(inside, tl.exp(theirs) * (theirs - warm), 0.0), 0)
            gradient += weight * (tl.exp(warm) - tl.exp(theirs))
        tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=inside)
    tl.store(losses + row, norm - target_logit)
    tl.store(losses + tl.num_programs(0) + row, divergence)


def losses_(
    logits: Tensor, teacher: Tensor | None, targets: Tensor, *, temperature: float, weight: float
) -> tuple[Tensor, Tensor]:
    """Return cross entropy and KL(teacher || student) of each of n tokens from logits [n, V].

    `logits` is overwritten by the gradient of cross entropy + weight T^2 KL.
    """
    assert all(tensor.is_contiguous() for tensor in (logits, teacher) if tensor is not None)
    count, vocabulary = logits.shape
    losses = torch.empty(2, count, dtype=torch.float32, device=logits.device)
    _losses[(count,)](
        logits, logits if teacher is None else teacher, targets, losses, vocabulary, 1 / temperature,
        weight * temperature, HAS_TEACHER=teacher is not None,
    )  # fmt: skip
    return losses[0], losses[1]
