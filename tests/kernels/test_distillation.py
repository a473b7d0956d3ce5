"""The loss of a few tokens at a time is the formula over all logits, in value and gradient, in little memory."""

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
CASES = [
    *((kind, 2.0, 1.0, rows) for kind in ("none", "whole") for rows in (0, 1, 4, 5, N, 100)),  # 0: less than one row
    *(("whole", temperature, weight, 5) for temperature in (0.5, 1.0, 2.0, 7.0) for weight in (0.0, 0.3, 2.5)),
    *((k, temperature, 0.7, 5) for k in (1, 6, V - 2) for temperature in (1.0, 3.0)),
]


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


def lumped(log_probs, ids):
    """Return the k log probabilities at `ids`, and that of all other tokens together."""
    rest = log_probs.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, ids), rest], -1)


def naive(hidden, head, teacher=WHOLE, temperature=2.0, weight=1.0):
    """Return loss, cross entropy and T^2 KL by the formula."""
    logits = hidden @ head.mT
    cross_entropy = F.cross_entropy(logits, TARGETS)
    if teacher is None:
        return cross_entropy, cross_entropy, torch.tensor(0.0)
    ours, theirs = (logits / temperature).log_softmax(-1), teacher_log_probs(temperature)
    if isinstance(teacher, TopDistribution):
        ours, theirs = (lumped(log_probs, teacher.ids.long()) for log_probs in (ours, theirs))
    divergence = temperature**2 * (theirs.exp() * (theirs - ours)).sum(-1).mean()
    return cross_entropy + weight * divergence, cross_entropy, divergence


def same(actual, expected):
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), **CLOSE)


@pytest.mark.parametrize(("teacher", "temperature", "weight", "rows"), CASES)
def test_the_loss_and_its_gradient_are_the_formula(teacher, temperature, weight, rows):
    """For chunks of any size, every temperature and weight, and a teacher's whole distribution or its best tokens."""
    hidden, head = student()
    options = {"temperature": temperature, "weight": weight}
    known = {"none": None, "whole": WHOLE}
    distribution = known[teacher] if teacher in known else top(teacher, temperature)
    actual = distilled_loss(hidden, head, TARGETS, distribution, **options, logits_at_once=rows * V + V // 2)
    expected = naive(hidden, head, distribution, **options)
    same(actual, expected)
    same(torch.autograd.grad(actual[0], (hidden, head)), torch.autograd.grad(expected[0], (hidden, head)))


@pytest.mark.parametrize("frozen", ["hidden", "head", "both"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen):
    tensors = dict(zip(("hidden", "head"), student(), strict=True))
    free = {name: tensor.detach().clone().requires_grad_(frozen not in (name, "both"))
            for name, tensor in tensors.items()}  # fmt: skip
    loss, *parts = distilled_loss(free["hidden"], free["head"], TARGETS, WHOLE, logits_at_once=5 * V)
    expected = naive(**tensors)
    same([loss, *parts], expected)
    assert loss.requires_grad == (frozen != "both")
    assert not any(part.requires_grad for part in parts), "they are for the record only"
    if frozen != "both":
        loss.backward()
        expected[0].backward()
    for name, tensor in free.items():
        if tensor.requires_grad:
            same([tensor.grad], [tensors[name].grad])
        else:
            assert tensor.grad is None


def test_the_gradient_passes_through_what_comes_before_and_after():
    hidden, head = student()
    below = drawn(D, D, seed=5).requires_grad_()
    losses = distilled_loss(hidden @ below, head, TARGETS, WHOLE, logits_at_once=5 * V), naive(hidden @ below, head)
    same(*[torch.autograd.grad(loss * -3.5 + 1, (below, hidden, head)) for loss, *_ in losses])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_all_tokens_but_one_are_the_whole_distribution(temperature):
    hidden, head = student()
    losses = [
        distilled_loss(hidden, head, TARGETS, teacher, temperature=temperature, logits_at_once=5 * V)
        for teacher in (top(V - 1, temperature), WHOLE)
    ]
    same(*losses)
    same(*[torch.autograd.grad(loss, (hidden, head)) for loss, *_ in losses])


def test_more_of_the_best_tokens_bound_the_divergence_more_closely_from_below():
    hidden, head = student()
    bounds = [float(distilled_loss(hidden, head, TARGETS, top(k, 2.0))[2]) for k in range(1, V)]
    assert bounds[0] > 0
    assert all(more >= fewer - 1e-5 for fewer, more in pairwise(bounds))
    whole = float(distilled_loss(hidden, head, TARGETS, WHOLE)[2])
    assert max(bounds) <= whole + 1e-5
    assert bounds[0] < 0.8 * whole  # so that the bounds had room to grow


@pytest.mark.parametrize("gap", [5.0, 10.0, 20.0, 60.0])
def test_a_student_too_sure_of_the_best_tokens_learns_of_the_rest(gap):
    """The teacher gives the rest 0.3, the student about e^-gap."""
    best, ids = torch.tensor([[0.3, 0.2, 0.15, 0.05]], dtype=torch.float64), torch.arange(4).unsqueeze(0)
    logits = torch.where(torch.arange(V) < 4, gap, 0.0).double().unsqueeze(0).requires_grad_()
    actual = TopDistribution(ids=ids, log_probs=best.log()).divergence(slice(0, 1), logits.float(), 1.0)
    theirs = torch.cat([best, 1 - best.sum(-1, keepdim=True)], -1).log()
    expected = (theirs.exp() * (theirs - lumped(logits.log_softmax(-1), ids))).sum()
    gradients = [torch.autograd.grad(divergence, logits)[0] for divergence in (actual, expected)]
    same([actual, gradients[0]], [expected, gradients[1]])
    assert gradients[0][0, 4:].sum() < -0.2  # towards a larger probability


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
    losses = distilled_loss(hidden, head, TARGETS, teacher, temperature=2.0, logits_at_once=5 * V)
    gradients = torch.autograd.grad(losses[0], (hidden, head))
    assert all(bool(tensor.isfinite().all()) for tensor in (*losses, *gradients))


def test_bfloat16_autocast_stays_near_float32():
    hidden, head = (tensor.detach().float().requires_grad_() for tensor in student())
    plain = distilled_loss(hidden, head, TARGETS, WHOLE, logits_at_once=5 * V)
    with torch.autocast("cpu", torch.bfloat16):
        cast = distilled_loss(hidden, head, TARGETS, WHOLE, logits_at_once=5 * V)
    assert cast[0].dtype == torch.float32
    assert not torch.equal(cast[0], plain[0])  # it had an effect
    for a, b in zip(cast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    gradients = [torch.autograd.grad(loss, (hidden, head)) for loss in (cast[0], plain[0])]
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


class Sizes(TorchDispatchMode):
    """Note the elements of the largest tensor that is created."""

    largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
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
        for actual, wanted in zip(distillation._in_one_kernel(hidden @ head.mT, *rest), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=2e-5, atol=5e-6)
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
    half, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    (64 * distilled_loss(half, head, targets)[0]).backward()
    torch.nn.functional.cross_entropy(exact @ head.double().mT, targets, reduction="sum").backward()
    torch.testing.assert_close(half.grad.double(), exact.grad, rtol=5e-3, atol=2e-3)
