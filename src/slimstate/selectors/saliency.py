"""Grad: the first-order effect of a channel on the loss.

W_q and W_k are [H, D, I], a row of input weights per channel; L is the summed language-model loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimstate.selectors.contract import Case, Request, Selector, scored
from slimstate.selectors.ranking import best_of


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


SELECTORS = (
    Selector(
        name="grad",
        summary="largest first-order effect on the loss",
        needs=frozenset({"weight", "gradient"}),
        choose=best_of(saliency),
        order=40,
    ),
)
