"""What a selector is given and what it must say about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from slimstate.core.evidence import Evidence, Need
from slimstate.core.plan import Choice
from slimstate.system.errors import PlanError

SCORES = ("kq", "k", "q")


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that is known of the channels of one mixer. Weights are [H, D, input size]."""

    heads: int
    width: int
    query_weight: Tensor | None = None
    key_weight: Tensor | None = None
    evidence: Evidence | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """How many channels or directions to keep in every head, judged by keys, queries or both.

    `device` is where to work it out.
    """

    keep: int
    score: str = "kq"
    seed: int = 0
    f: float = 1.5
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise PlanError(f"unknown score {self.score!r}; there are {', '.join(SCORES)}")
        if not self.f >= 1:
            raise PlanError(f"f = {self.f}: strong RRQR needs f >= 1")


@dataclass(frozen=True, kw_only=True)
class Selector:
    """A way to choose channels, or with `rotates` directions: a `Basis` instead of a `Selection`.

    `needs` says what must be collected for it; `choose` sees the mixers one by one. `options` are the fields of the
    request that a plan remembers of it, `order` its place in lists.
    """

    name: str
    summary: str
    needs: frozenset[Need]
    choose: Callable[[Iterable[Case], Request], Sequence[Choice]]
    options: tuple[str, ...] = ()
    rotates: bool = False
    order: int = 1000

    @property
    def calibrated(self) -> bool:
        return bool(self.needs - {"weight"})


def scored(score: str, query: Tensor | None, key: Tensor | None) -> list[Tensor]:
    """The tensors that `score` asks for, out of the query's and the key's."""
    wanted = {"kq": [query, key], "k": [key], "q": [query]}[score]
    found = [tensor for tensor in wanted if tensor is not None]
    if len(found) < len(wanted):
        raise ValueError("a case without what its selector needs")
    return found
