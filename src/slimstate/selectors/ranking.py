"""Selectors that score each channel by itself and keep the highest: L1, S-Wanda, Grad, and random channels.

W_q and W_k are [H, D, I], a row of input weights per channel; X is the mixer's input over all calibration tokens, L the
summed language-model loss. A `score` of keys or queries leaves out the terms of the other.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from slimstate.core.selection import Selection
from slimstate.selectors.contract import Case, Request, Selector, scored


def best_of(score: Callable[[Case, Request], Tensor]) -> Callable[[Iterable[Case], Request], list[Selection]]:
    """Turn a score of every channel [H, D] of a mixer into the `choose` of a selector; of equals, the first is kept."""

    def choose(cases: Iterable[Case], request: Request) -> list[Selection]:
        orders = (score(case, request).argsort(dim=-1, descending=True, stable=True) for case in cases)
        return [Selection(keep=order[..., : request.keep].sort(dim=-1).values) for order in orders]

    return choose


def choose_random(cases: Iterable[Case], request: Request) -> list[Selection]:
    """Return random channels: the control that every other selector must beat."""
    generator = torch.Generator().manual_seed(request.seed)
    return best_of(lambda case, _: torch.rand(case.heads, case.width, generator=generator))(cases, request)


def magnitude(case: Case, request: Request) -> Tensor:
    """Return s_j = sum_i |W_q[j, i]| + |W_k[j, i]|, [H, D]."""
    weights = scored(request.score, case.query_weight, case.key_weight)
    return torch.stack([weight.double().abs().sum(-1) for weight in weights]).sum(0)


def wanda(case: Case, request: Request) -> Tensor:
    """Return s_j = sum_i (|W_q[j, i]| + |W_k[j, i]|) ||X[:, i]||_2, [H, D]."""
    if case.evidence is None or case.evidence.input_square is None:
        raise ValueError("s-wanda needs evidence with `input`, got none")
    norm = case.evidence.input_square.double().sqrt()
    weights = scored(request.score, case.query_weight, case.key_weight)
    # a channel may have several rows, one after the other
    terms = [(weight.double().abs().unflatten(-1, (-1, len(norm))) @ norm).sum(-1) for weight in weights]
    return torch.stack(terms).sum(0)


def saliency(case: Case, request: Request) -> Tensor:
    """Return s_j = sum_i |W_q[j, i] dL/dW_q[j, i]| + |W_k[j, i] dL/dW_k[j, i]|, [H, D]."""
    if case.evidence is None:
        raise ValueError("grad needs evidence with `gradient`, got none")
    weights = scored(request.score, case.query_weight, case.key_weight)
    gradients = scored(request.score, case.evidence.query_gradient, case.evidence.key_gradient)
    pairs = zip(weights, gradients, strict=True)
    return torch.stack([(weight.double() * gradient.double()).abs().sum(-1) for weight, gradient in pairs]).sum(0)


SELECTORS = (
    Selector(name="random", summary="random channels, the control", needs=frozenset(), choose=choose_random, order=10),
    Selector(name="l1", summary="largest weights", needs=frozenset({"weight"}), choose=best_of(magnitude), order=20),
    Selector(
        name="s-wanda", summary="largest weights times input norms", needs=frozenset({"weight", "input"}),
        choose=best_of(wanda), order=30,
    ),
    Selector(
        name="grad", summary="largest first-order effect on the loss", needs=frozenset({"weight", "gradient"}),
        choose=best_of(saliency), order=40,
    ),
)  # fmt: skip

EQUAL = best_of(lambda case, _: torch.zeros(case.heads, case.width))  # of a cut of values alone; no method to ask for
KEEP_ALL = Selector(name="all", summary="all channels", needs=frozenset(), choose=EQUAL)
