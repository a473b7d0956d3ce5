"""S-Wanda: weights times the norms of what they are multiplied with.

W_q and W_k are [H, D, I], a row of input weights per channel; X is the mixer's input over all calibration tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimstate.selectors.contract import Case, Request, Selector, scored
from slimstate.selectors.ranking import best_of


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


SELECTORS = (
    Selector(
        name="s-wanda",
        summary="largest weights times input norms",
        needs=frozenset({"weight", "input"}),
        choose=best_of(wanda),
        order=30,
    ),
)
