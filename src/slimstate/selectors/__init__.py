"""The registry of selectors, and `choose`, which checks every request and every result.

A new selector is one module of this package, which lists one or more `Selector` values as SELECTORS = (...). It is
registered here and covered by the contract tests without another edit. Other packages announce theirs as entry points
of the group `slimstate.selectors`.
"""

import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter

from slimstate.core.selection import Basis, Choice
from slimstate.selectors.contract import SCORES, Case, Request, Selector, scored
from slimstate.selectors.ranking import best_of
from slimstate.selectors.values import VALUE_METHODS
from slimstate.system.errors import PlanError, quoted
from slimstate.system.plugins import Registry

__all__ = [
    "METHODS", "SCORES", "VALUE_METHODS", "Case", "Method", "Request", "Selector", "best_of", "channel_methods",
    "choose", "scored", "selector_named", "value_selector_named",
]  # fmt: skip

METHODS: Registry[Selector] = Registry(
    Selector, sys.modules[__name__], "SELECTORS", name=attrgetter("name"), order=attrgetter("order", "name")
)
Method = str | Selector


def channel_methods() -> list[str]:
    """Return the names of the methods that keep channels, without those that rotate them."""
    return [name for name, selector in METHODS.items() if not selector.rotates]


def value_selector_named(method: Method) -> Selector:
    """Return the selector of values of that name, or `method` itself if it is a selector."""
    if isinstance(method, Selector):
        return method
    if method not in VALUE_METHODS:
        raise PlanError(f"unknown `value_method` {quoted(method)}; there are {', '.join(VALUE_METHODS)}")
    return VALUE_METHODS[method]


def selector_named(method: Method) -> Selector:
    """Return the selector of that name, or `method` itself if it is a selector with a name of its own."""
    if isinstance(method, Selector):
        if METHODS.get(method.name, method) != method:
            raise PlanError(f"a method {method.name} exists already: give your selector another `name`")
        return method
    if not isinstance(method, str):
        raise PlanError(f"`method` must be the name of a selector or a Selector, got {quoted(repr(method))}")
    if method not in METHODS:
        raise PlanError(f"unknown method {method!r}; there are {', '.join(METHODS)}")
    return METHODS[method]


def choose(method: Method, cases: Iterable[Case], request: Request) -> Sequence[Choice]:
    """Return the channels or directions that a method keeps for every case."""
    selector = method if isinstance(method, Selector) else selector_named(method)
    sizes: list[tuple[int, int]] = []

    def note_sizes() -> Iterable[Case]:
        for case in cases:
            sizes.append((case.heads, case.width))
            yield case

    selections = selector.choose(note_sizes(), request)
    for (heads, width), selection in zip(sizes, selections, strict=True):
        shape = tuple(selection.rows.shape if isinstance(selection, Basis) else selection.keep.shape)
        fits = shape[2] == width if isinstance(selection, Basis) else int(selection.keep.max()) < width
        if shape[:2] != (heads, request.keep) or not fits:
            expected = f"{heads} heads keeping {request.keep} of {width}"
            raise PlanError(f"the selector {selector.name} returned {shape} for {expected}")
    return selections
