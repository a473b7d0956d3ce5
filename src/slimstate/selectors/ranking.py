"""Keep the channels with the highest scores, for selectors that score each channel by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from slimstate.core.selection import Selection
from slimstate.selectors.contract import Case, Request


def keep_best(scores: Tensor, keep: int) -> Tensor:
    """Return the `keep` highest of each row of [H, D], ascending; of equals, the first."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :keep].sort(dim=-1).values


def best_of(score: Callable[[Case, Request], Tensor]) -> Callable[[Iterable[Case], Request], list[Selection]]:
    """Turn a score of every channel of a mixer into the `choose` of a selector."""

    def choose(cases: Iterable[Case], request: Request) -> list[Selection]:
        return [Selection(keep=keep_best(score(case, request), request.keep)) for case in cases]

    return choose
