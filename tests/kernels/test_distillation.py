"""The loss taken a few tokens at a time is the formula over whole logits, in value and gradient, and stays small."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slimstate.kernels.distillation import FullDistribution, TopDistribution, distilled_loss

N, V, D = 12, 23, 5
CLOSE = {"rtol": 1e-5, "atol": 2e-6}  # logits are float32


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def student() -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(N, D, seed=0).requires_grad_(), drawn(V, D, seed=1).requires_grad_()


TARGETS = torch.randint(V, (N,), generator=torch.Generator().manual_seed(2))
WHOLE = FullDistribution(hidden=drawn(N, 7, seed=3), head=drawn(V, 7, seed=4))


def teacher_log_probs(temperature: float) -> torch.Tensor:
    return (WHOLE.hidden @ WHOLE.head.mT / temperature).log_softmax(-1)


def top(k: int, temperature: float) -> TopDistribution:
    best = teacher_log_probs(temperature).topk(k)
    return TopDistribution(ids=best.indices.to(torch.int32), log_probs=best.values)


def naive(hidden, head, temperature=2.0, weight=1.0, theirs=None):
    """The formula: loss, cross entropy, T^2 KL; `theirs` are the teacher's log probabilities at the temperature."""
    logits = hidden @ head.mT
    cross_entropy = F.cross_entropy(logits, TARGETS)
    if theirs is None:
        return cross_entropy, cross_entropy, torch.tensor(0.0)
    ours = (logits / temperature).log_softmax(-1)
    divergence = temperature**2 * (theirs.exp() * (theirs - ours)).sum(-1).mean()
    return cross_entropy + weight * divergence, cross_entropy, divergence


def lumped(log_probs, ids):
    """The k log probabilities at `ids`, and that of all the other tokens together."""
    rest = log_probs.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, ids), rest], -1)


def same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), **CLOSE)


@pytest.mark.parametrize("rows", [0, 1, 4, 5, N, 100])  # 0: fewer elements than one row of logits
@pytest.mark.parametrize("taught", [True, False])
def test_chunks_of_any_size_give_the_whole_formula(rows, taught):
    hidden, head = student()
    teacher, theirs = (WHOLE, teacher_log_probs(2.0)) if taught else (None, None)
    found = distilled_loss(hidden, head, TARGETS, teacher, logits_at_once=rows * V + V // 2)
    expected = naive(hidden, head, theirs=theirs)
    same(found, expected)
    same(torch.autograd.grad(found[0], (hidden, head)), torch.autograd.grad(expected[0], (hidden, head)))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 7.0])
@pytest.mark.parametrize("weight", [0.0, 0.3, 2.5])
def test_every_temperature_and_weight_gives_the_formula(temperature, weight):
    hidden, head = student()
    options = {"temperature": temperature, "weight": weight}
    found = distilled_loss(hidden, head, TARGETS, WHOLE, **options, logits_at_once=5 * V)
    expected = naive(hidden, head, **options, theirs=teacher_log_probs(temperature))
    same(found, expected)
    same(torch.autograd.grad(found[0], (hidden, head)), torch.autograd.grad(expected[0], (hidden, head)))


def test_a_teacher_without_weight_teaches_nothing():
    hidden, head = student()
    taught = distilled_loss(hidden, head, TARGETS, WHOLE, weight=0.0)
    alone = distilled_loss(hidden, head, TARGETS)
    assert taught[0] == alone[0]
    assert taught[2] > 0 == alone[2]
    pairs = [torch.autograd.grad(loss, (hidden, head)) for loss in (taught[0], alone[0])]
    same(*pairs)


@pytest.mark.parametrize("frozen", ["hidden", "head", "both"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen):
    tensors = dict(zip(("hidden", "head"), student(), strict=True))
    free = {name: tensor.detach().clone().requires_grad_(frozen not in (name, "both"))
            for name, tensor in tensors.items()}  # fmt: skip
    loss = distilled_loss(free["hidden"], free["head"], TARGETS, WHOLE, logits_at_once=5 * V)[0]
    expected = naive(**tensors, theirs=teacher_log_probs(2.0))[0]
    same([loss], [expected])
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
        expected.backward()
    for name, tensor in free.items():
        if tensor.requires_grad:
            same([tensor.grad], [tensors[name].grad])
        else:
            assert tensor.grad is None


def test_what_comes_after_the_loss_scales_its_gradient():
    hidden, head = student()
    (distilled_loss(hidden, head, TARGETS, WHOLE, logits_at_once=5 * V)[0] * -3.5 + 1).backward()
    expected = torch.autograd.grad(naive(hidden, head, theirs=teacher_log_probs(2.0))[0], (hidden, head))
    same([hidden.grad, head.grad], [-3.5 * gradient for gradient in expected])


def test_the_gradient_goes_on_to_what_the_hidden_states_were_made_of():
    hidden, head = student()
    below = drawn(D, D, seed=5).requires_grad_()
    found = distilled_loss(hidden @ below, head, TARGETS, WHOLE, logits_at_once=5 * V)[0]
    expected = naive(hidden @ below, head, theirs=teacher_log_probs(2.0))[0]
    same(torch.autograd.grad(found, (below, hidden)), torch.autograd.grad(expected, (below, hidden)))


def test_the_parts_are_for_the_record_only():
    loss, *parts = distilled_loss(*student(), TARGETS, WHOLE)
    assert loss.requires_grad
    assert not any(part.requires_grad for part in parts)


def test_where_no_gradient_is_recorded_the_value_is_the_same():
    hidden, head = student()
    with torch.no_grad():
        found = distilled_loss(hidden, head, TARGETS, WHOLE)
    same(found, naive(hidden, head, theirs=teacher_log_probs(2.0)))
    assert not found[0].requires_grad


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_all_tokens_but_one_are_the_whole_distribution(temperature):
    hidden, head = student()
    losses = [
        distilled_loss(hidden, head, TARGETS, teacher, temperature=temperature, logits_at_once=5 * V)
        for teacher in (top(V - 1, temperature), WHOLE)
    ]
    same(*losses)
    same(*[torch.autograd.grad(loss, (hidden, head)) for loss, *_ in losses])


def test_the_best_tokens_bound_the_divergence_from_below_and_more_of_them_more_closely():
    hidden, head = student()
    bounds = [float(distilled_loss(hidden, head, TARGETS, top(k, 2.0))[2]) for k in range(1, V)]
    assert bounds[0] > 0
    assert all(more >= fewer - 1e-5 for fewer, more in pairwise(bounds))
    whole = float(distilled_loss(hidden, head, TARGETS, WHOLE)[2])
    assert max(bounds) <= whole + 1e-5
    assert bounds[0] < 0.8 * whole  # so that the bounds had room to grow


@pytest.mark.parametrize("k", [1, 6, V - 2])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_best_tokens_and_the_rest_as_one_give_the_formula(k, temperature):
    hidden, head = student()
    teacher = top(k, temperature)
    found = distilled_loss(hidden, head, TARGETS, teacher, temperature=temperature, weight=0.7, logits_at_once=5 * V)
    ids = teacher.ids.long()
    ours = lumped((hidden @ head.mT / temperature).log_softmax(-1), ids)
    theirs = lumped(teacher_log_probs(temperature), ids)
    divergence = temperature**2 * (theirs.exp() * (theirs - ours)).sum(-1).mean()
    expected = naive(hidden, head)[0] + 0.7 * divergence
    same([found[0], found[2]], [expected, divergence])
    same(torch.autograd.grad(found[0], (hidden, head)), torch.autograd.grad(expected, (hidden, head)))


@pytest.mark.parametrize("gap", [5.0, 10.0, 20.0, 60.0])
def test_a_student_too_sure_of_the_best_tokens_learns_of_the_rest(gap):
    """Of the tokens that the teacher gives 0.3, the student believes e^-gap or so."""
    best, ids = torch.tensor([[0.3, 0.2, 0.15, 0.05]], dtype=torch.float64), torch.arange(4).unsqueeze(0)
    logits = torch.where(torch.arange(V) < 4, gap, 0.0).double().unsqueeze(0).requires_grad_()
    found = TopDistribution(ids=ids, log_probs=best.log()).divergence(slice(0, 1), logits.float(), 1.0)
    theirs = torch.cat([best, 1 - best.sum(-1, keepdim=True)], -1).log()
    expected = (theirs.exp() * (theirs - lumped(logits.log_softmax(-1), ids))).sum()
    gradients = [torch.autograd.grad(divergence, logits)[0] for divergence in (found, expected)]
    same([found, gradients[0]], [expected, gradients[1]])
    assert gradients[0][0, 4:].sum() < -0.2  # it is told to believe more of it


@pytest.mark.parametrize("sure", ["teacher", "student", "both"])
@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_a_rest_of_no_probability_gives_finite_numbers(sure, precision):
    """As logarithms in half precision, probabilities may even add up to more than one."""
    hidden, head = student()
    favourites = torch.arange(N) % V
    if sure != "teacher":
        hidden = (head.detach()[favourites] * 100).requires_grad_()
    scale = 1.0 if sure == "student" else 100.0
    best = (teacher_log_probs(1.0) * scale).log_softmax(-1).topk(4)
    log_probs = best.values.to(precision)
    if sure != "student":
        log_probs[0] = torch.tensor([-1.0, -1.0, -1.4, -5.0])  # 1.0 and a little more
    teacher = TopDistribution(ids=best.indices, log_probs=log_probs)
    found = distilled_loss(hidden, head, TARGETS, teacher, temperature=2.0, logits_at_once=5 * V)
    gradients = torch.autograd.grad(found[0], (hidden, head))
    assert all(bool(tensor.isfinite().all()) for tensor in (*found, *gradients))


def test_bfloat16_autocast_stays_near_float32():
    hidden, head = (tensor.detach().float().requires_grad_() for tensor in student())
    plain = distilled_loss(hidden, head, TARGETS, WHOLE, logits_at_once=5 * V)
    with torch.autocast("cpu", torch.bfloat16):
        cast = distilled_loss(hidden, head, TARGETS, WHOLE, logits_at_once=5 * V)
    assert cast[0].dtype == torch.float32
    assert not torch.equal(cast[0], plain[0])  # it was felt
    for a, b in zip(cast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    gradients = [torch.autograd.grad(loss, (hidden, head)) for loss in (cast[0], plain[0])]
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


class Sizes(TorchDispatchMode):
    """Notes the most elements of any tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *made, 0)
        return out


@pytest.mark.parametrize("kind", ["whole", "top", "none"])
@pytest.mark.parametrize("cast", [False, True])
def test_no_tensor_of_all_tokens_by_the_vocabulary_ever_exists(kind, cast):
    tokens, vocabulary, at_once = 300, 500, 4000
    hidden, head = (drawn(size, D, seed=6).float().requires_grad_() for size in (tokens, vocabulary))
    targets = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(7))
    theirs = FullDistribution(hidden=drawn(tokens, 7, seed=8).float(), head=drawn(vocabulary, 7, seed=9).float())
    best = (theirs.hidden @ theirs.head.mT / 2.0).log_softmax(-1).topk(9)
    few = TopDistribution(ids=best.indices, log_probs=best.values)
    teacher = {"whole": theirs, "top": few, "none": None}[kind]
    with Sizes() as ours, torch.autocast("cpu", torch.bfloat16, enabled=cast):
        distilled_loss(hidden, head, targets, teacher, logits_at_once=at_once)[0].backward()
    with Sizes() as whole:
        F.cross_entropy(hidden @ head.mT, targets).backward()
    inputs = (hidden, head, theirs.hidden, theirs.head, best.values)
    assert max(tensor.numel() for tensor in inputs) < at_once == ours.largest
    assert whole.largest >= tokens * vocabulary


KERNEL = """
import torch
from slimstate.kernels import distillation

torch.manual_seed(0)
count, vocabulary, size = 5, 9001, 8  # more than two blocks, the last of them not full
targets = torch.randint(vocabulary, (count,))
targets[0] = vocabulary - 1
for temperature in (0.7, 1.0, 2.0):
    for taught in (False, True):
        hidden, head = 2 * torch.randn(count, size), torch.randn(vocabulary, size)
        teacher = distillation.FullDistribution(hidden=torch.randn(count, size), head=torch.randn(vocabulary, size))
        rest = (targets, teacher if taught else None, slice(0, count), temperature, 0.6)
        expected = distillation._in_pytorch(hidden @ head.mT, *rest)
        for found, wanted in zip(distillation._in_one_kernel(hidden @ head.mT, *rest), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=5e-6)
print("same")
"""


@pytest.mark.slow
def test_the_kernel_gives_the_same_sums_and_gradient():
    """In Triton's interpreter, which needs no GPU."""
    interpreted = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", KERNEL], capture_output=True, text=True, check=False, env=interpreted)
    assert done.stdout == "same\n", done.stderr


def test_the_gradient_of_a_sum_is_not_divided_first():
    """In half precision the share of one token among many would be lost."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(*size, generator=generator).half() for size in ((64, 8), (16, 8)))
    targets = torch.randint(16, (64,), generator=generator)
    given, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    (64 * distilled_loss(given, head, targets)[0]).backward()
    torch.nn.functional.cross_entropy(exact @ head.double().mT, targets, reduction="sum").backward()
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=5e-3, atol=2e-3)
