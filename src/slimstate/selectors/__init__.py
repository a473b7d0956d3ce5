"""The registry of selectors, and the one door to them: `choose`, which validates every request and every result.

A new selector is a module of this package and nothing else: one with `Selector` values, listed in its SELECTORS. It is
found here by itself, and the contract tests run on it by themselves. Other packages announce theirs as entry points of
the group `slimstate.selectors`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from slimstate.core.plan import Basis, Choice
from slimstate.selectors.contract import SCORES, Case, Request, Selector, scored
from slimstate.selectors.ranking import best_of
from slimstate.system.errors import PlanError, quoted
from slimstate.system.plugins import Registry, plugged_in


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


def _all() -> dict[str, Selector]:
    theirs = plugged_in("slimstate.selectors", Selector, lambda selector: selector.name, OURS)
    return by_name((*OURS.values(), *theirs))


def _that_rotate(rotates: bool) -> dict[str, Selector]:
    return {name: selector for name, selector in METHODS.items() if selector.rotates is rotates}


OURS = by_name(found_in(__name__, __path__))
METHODS: Registry[Selector] = Registry(_all)
SELECTORS: Registry[Selector] = Registry(lambda: _that_rotate(False))
ROTATIONS: Registry[Selector] = Registry(lambda: _that_rotate(True))


Method: TypeAlias = str | Selector


def selector_named(method: Method) -> Selector:
    """The selector of that name, or the one that is given; which must not have the name of another."""
    if isinstance(method, Selector):
        if METHODS.get(method.name, method) != method:
            raise PlanError(f"there is a method {method.name} already: give your selector another `name`")
        return method
    if not isinstance(method, str):
        raise PlanError(f"`method` is the name of a selector or a Selector, and not {quoted(repr(method))}")
    if method not in METHODS:
        raise PlanError(f"unknown method {method!r}; there are {', '.join(METHODS)}")
    return METHODS[method]


def choose(method: Method, cases: Iterable[Case], request: Request) -> Sequence[Choice]:
    """The channels or directions every case keeps, by a method."""
    selector = selector_named(method)
    sizes: list[tuple[int, int]] = []

    def noted() -> Iterable[Case]:
        for case in cases:
            sizes.append((case.heads, case.width))
            yield case

    selections = selector.choose(noted(), request)
    for (heads, width), selection in zip(sizes, selections, strict=True):
        shape = tuple(selection.rows.shape if isinstance(selection, Basis) else selection.keep.shape)
        fits = shape[2] == width if isinstance(selection, Basis) else int(selection.keep.max()) < width
        if shape[:2] != (heads, request.keep) or not fits:
            wanted = f"{heads} heads keeping {request.keep} of {width}"
            raise PlanError(f"the selector {selector.name} returned {shape} for {wanted}")
    return selections


__all__ = [
    "METHODS",
    "ROTATIONS",
    "SCORES",
    "SELECTORS",
    "Case",
    "Method",
    "Request",
    "Selector",
    "best_of",
    "by_name",
    "choose",
    "found_in",
    "scored",
    "selector_named",
]  # fmt: skip
