"""L1: keep the channels with the largest weights. W_q and W_k are [H, D, I], a row of input weights per channel."""

from __future__ import annotations

import torch
from torch import Tensor

from slimstate.selectors.contract import Case, Request, Selector, scored
from slimstate.selectors.ranking import best_of


def magnitude(case: Case, request: Request) -> Tensor:
    """s_j = sum_i |W_q[j, i]| + |W_k[j, i]|"""
    weights = scored(request.score, case.query_weight, case.key_weight)
    return torch.stack([weight.double().abs().sum(-1) for weight in weights]).sum(0)


SELECTORS = (
    Selector(name="l1", summary="largest weights", needs=frozenset({"weight"}), choose=best_of(magnitude), order=20),
)
