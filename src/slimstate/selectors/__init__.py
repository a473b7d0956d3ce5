"""The registry of selectors, and the one door to them: `choose`, which validates every request and every result.

A new selector is a module of this package and nothing else: one with `Selector` values, listed in its SELECTORS. It is
found here by itself, and the contract tests run on it by themselves.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Sequence

from slimstate.core.plan import Basis, Choice
from slimstate.selectors.contract import SCORES, Case, Request, Selector
from slimstate.system.errors import PlanError


def found_in(package: str, places: Iterable[str]) -> Iterator[Selector]:
    """The selectors that the modules of a package list; modules without such a list are parts they share."""
    for name in sorted(module.name for module in pkgutil.iter_modules(places)):
        module = importlib.import_module(f"{package}.{name}")
        for selector in getattr(module, "SELECTORS", ()):
            if not isinstance(selector, Selector):
                raise TypeError(f"{module.__name__} lists {selector!r}, which is no Selector")
            yield selector


def by_name(selectors: Iterable[Selector]) -> dict[str, Selector]:
    """In their order; no two have one name."""
    found: dict[str, Selector] = {}
    for selector in sorted(selectors, key=lambda selector: (selector.order, selector.name)):
        if selector.name in found:
            raise TypeError(f"two selectors of the name {selector.name}")
        found[selector.name] = selector
    return found


METHODS: dict[str, Selector] = by_name(found_in(__name__, __path__))
SELECTORS = {name: selector for name, selector in METHODS.items() if not selector.rotates}
ROTATIONS = {name: selector for name, selector in METHODS.items() if selector.rotates}


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
    "METHODS", "ROTATIONS", "SCORES", "SELECTORS", "Case", "Request", "Selector", "by_name", "choose", "found_in",
    "selector_named",
]  # fmt: skip
