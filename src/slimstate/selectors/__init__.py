"""The registry of selectors, and the one door to them: `choose`, which validates every request and every result.

A new selector is one module with one `Selector` value, named below: in SELECTORS where it keeps channels, in ROTATIONS
where it keeps directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slimstate.core.evidence import Need
from slimstate.core.plan import Basis, Choice
from slimstate.selectors.contract import SCORES, Case, Request, Selector
from slimstate.selectors.rotations import PCA, PCA_ADVERSARIAL, RANDOM_ROTATION
from slimstate.selectors.rrqr import DRRQR
from slimstate.selectors.scores import GRAD, L1, RANDOM, S_WANDA
from slimstate.system.errors import PlanError

SELECTORS: dict[str, Selector] = {selector.name: selector for selector in (RANDOM, L1, S_WANDA, GRAD, DRRQR)}
ROTATIONS: dict[str, Selector] = {selector.name: selector for selector in (PCA, PCA_ADVERSARIAL, RANDOM_ROTATION)}
METHODS = {**SELECTORS, **ROTATIONS}


def selector_named(name: str) -> Selector:
    if name not in METHODS:
        raise PlanError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    return METHODS[name]


def choose(name: str, cases: Iterable[Case], request: Request) -> Sequence[Choice]:
    """The channels or directions every case keeps, by the method of that name."""
    sizes: list[tuple[int, int]] = []

    def noted() -> Iterable[Case]:
        for case in cases:
            sizes.append((case.heads, case.width))
            yield case

    selections = selector_named(name).choose(noted(), request)
    for (heads, width), selection in zip(sizes, selections, strict=True):
        shape = tuple(selection.rows.shape if isinstance(selection, Basis) else selection.keep.shape)
        fits = shape[2] == width if isinstance(selection, Basis) else int(selection.keep.max()) < width
        if shape[:2] != (heads, request.keep) or not fits:
            raise AssertionError(f"{name} returned {shape} for {heads} heads keeping {request.keep} of {width}")
    return selections


__all__ = [
    "METHODS", "ROTATIONS", "SCORES", "SELECTORS", "Case", "Need", "Request", "Selector", "choose",
    "selector_named",
]  # fmt: skip
