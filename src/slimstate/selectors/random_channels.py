"""Random channels: the control that every other way to choose must beat."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slimstate.core.selection import Selection
from slimstate.selectors.contract import Case, Request, Selector
from slimstate.selectors.ranking import keep_best


def choose_random(cases: Iterable[Case], request: Request) -> list[Selection]:
    generator = torch.Generator().manual_seed(request.seed)
    return [
        Selection(keep=keep_best(torch.rand(case.heads, case.width, generator=generator), request.keep))
        for case in cases
    ]


SELECTORS = (
    Selector(name="random", summary="random channels, the control", needs=frozenset(), choose=choose_random, order=10),
)
