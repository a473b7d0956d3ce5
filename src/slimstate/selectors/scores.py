"""Selectors that give every channel a number and keep the best: random, L1, S-Wanda and Grad, as in the paper.

W_q and W_k are [H, D, I] here: one row of input weights per channel. X is the mixer's input over all calibration
tokens, L the summed language-model loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from slimstate.core.plan import Selection
from slimstate.selectors.contract import Case, Request, Selector, scored


def keep_best(scores: Tensor, keep: int) -> Tensor:
    """The `keep` highest of each row of [H, D], ascending; of equals, the first."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :keep].sort(dim=-1).values


def best_of(score: Callable[[Case, Request], Tensor]) -> Callable[[Iterable[Case], Request], list[Selection]]:
    def choose(cases: Iterable[Case], request: Request) -> list[Selection]:
        return [Selection(keep=keep_best(score(case, request), request.keep)) for case in cases]

    return choose


def choose_random(cases: Iterable[Case], request: Request) -> list[Selection]:
    generator = torch.Generator().manual_seed(request.seed)
    return [
        Selection(keep=keep_best(torch.rand(case.heads, case.width, generator=generator), request.keep))
        for case in cases
    ]


def magnitude(case: Case, request: Request) -> Tensor:
    """s_j = sum_i |W_q[j, i]| + |W_k[j, i]|"""
    weights = scored(request.score, case.query_weight, case.key_weight)
    return torch.stack([weight.double().abs().sum(-1) for weight in weights]).sum(0)


def wanda(case: Case, request: Request) -> Tensor:
    """s_j = sum_i (|W_q[j, i]| + |W_k[j, i]|) ||X[:, i]||_2"""
    if case.evidence is None or case.evidence.input_square is None:
        raise ValueError("S-Wanda without input norms")
    norm = case.evidence.input_square.double().sqrt()
    weights = scored(request.score, case.query_weight, case.key_weight)
    # a channel may have several rows, one after the other
    return torch.stack(
        [(weight.double().abs().unflatten(-1, (-1, len(norm))) @ norm).sum(-1) for weight in weights]
    ).sum(0)


def saliency(case: Case, request: Request) -> Tensor:
    """s_j = sum_i |W_q[j, i] dL/dW_q[j, i]| + |W_k[j, i] dL/dW_k[j, i]|"""
    if case.evidence is None:
        raise ValueError("Grad without gradients")
    weights = scored(request.score, case.query_weight, case.key_weight)
    gradients = scored(request.score, case.evidence.query_gradient, case.evidence.key_gradient)
    terms = [
        (weight.double() * gradient.double()).abs().sum(-1) for weight, gradient in zip(weights, gradients, strict=True)
    ]
    return torch.stack(terms).sum(0)


RANDOM = Selector(name="random", summary="random channels, the control", needs=frozenset(), choose=choose_random)
L1 = Selector(name="l1", summary="largest weights", needs=frozenset({"weight"}), choose=best_of(magnitude))
S_WANDA = Selector(
    name="s-wanda",
    summary="largest weights times input norms",
    needs=frozenset({"weight", "input"}),
    choose=best_of(wanda),
)
GRAD = Selector(
    name="grad",
    summary="largest first-order effect on the loss",
    needs=frozenset({"weight", "gradient"}),
    choose=best_of(saliency),
)
