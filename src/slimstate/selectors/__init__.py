"""The registry of selectors, and the one door to them: `choose`, which validates every request and every result.

A new selector is one module with one `Selector` value, named in SELECTORS below.
"""

from __future__ import annotations

from collections.abc import Iterable

from slimstate.axes import Selection
from slimstate.errors import PlanError
from slimstate.selectors.contract import SCORES, Case, Need, Request, Selector
from slimstate.selectors.rrqr import DRRQR
from slimstate.selectors.scores import GRAD, L1, RANDOM, S_WANDA

SELECTORS: dict[str, Selector] = {selector.name: selector for selector in (RANDOM, L1, S_WANDA, GRAD, DRRQR)}


def selector_named(name: str) -> Selector:
    if name not in SELECTORS:
        raise PlanError(f"unknown method {name!r}; there are {', '.join(SELECTORS)}")
    return SELECTORS[name]


def choose(name: str, cases: Iterable[Case], request: Request) -> list[Selection]:
    """The channels every case keeps, by the method of that name."""
    sizes: list[tuple[int, int]] = []

    def noted() -> Iterable[Case]:
        for case in cases:
            sizes.append((case.heads, case.width))
            yield case

    selections = selector_named(name).choose(noted(), request)
    for (heads, width), selection in zip(sizes, selections, strict=True):
        if tuple(selection.keep.shape) != (heads, request.keep) or int(selection.keep.max()) >= width:
            raise AssertionError(
                f"{name} returned {tuple(selection.keep.shape)} for {heads} heads keeping {request.keep}"
            )
    return selections


__all__ = ["SCORES", "SELECTORS", "Case", "Need", "Request", "Selector", "choose", "selector_named"]
