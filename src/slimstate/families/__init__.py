"""The registry of architectures. A family reads a config and says where every key channel lives.

A new family is a module of this package and nothing else, which lists one or more values of a class of `Family` as
FAMILIES = (...). It is found here by itself, and the contract tests run on it by themselves. Other packages announce
theirs as entry points of the group `slimstate.families`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from types import ModuleType

from slimstate.core.stock_class import StockClass
from slimstate.families.contract import Config, Correction, Family
from slimstate.families.refused import refusal
from slimstate.system.errors import ModelError
from slimstate.system.plugins import Registry, plugged_in

__all__ = [
    "FAMILIES",
    "Config",
    "Correction",
    "Family",
    "by_model_type",
    "family_of",
    "found_in",
    "loader_of",
    "logit_factor",
]


def found_in(package: str, places: Iterable[str]) -> Iterator[Family]:
    """The families that the modules of a package list, by the names of the modules; others are parts they share."""
    for name in sorted(module.name for module in pkgutil.iter_modules(places)):
        yield from _listed(importlib.import_module(f"{package}.{name}"))


def _listed(module: ModuleType) -> tuple[Family, ...]:
    listed = getattr(module, "FAMILIES", None)
    if listed is None:
        if any(isinstance(value, Family) for value in vars(module).values()):
            raise TypeError(f"{module.__name__} has a family but does not list it: FAMILIES = (...,)")
        return ()
    if not isinstance(listed, tuple):
        raise TypeError(f"{module.__name__}: FAMILIES is not a tuple of families but {listed!r}")
    for candidate in listed:
        if not isinstance(candidate, Family):
            raise TypeError(f"{module.__name__} lists {candidate!r}, which is not a value of a class of Family")
    return listed


def by_model_type(families: Iterable[Family]) -> dict[str, Family]:
    """Those of one library together; no two families have one model type."""
    found: dict[str, Family] = {}
    for family in sorted(families, key=lambda family: family.library):
        if family.model_type in found:
            raise TypeError(f"two families of model type {family.model_type}")
        found[family.model_type] = family
    return found


def _all() -> dict[str, Family]:
    theirs = plugged_in("slimstate.families", Family, lambda family: family.model_type, OURS)
    return by_model_type((*OURS.values(), *theirs))


OURS = by_model_type(found_in(__name__, __path__))
FAMILIES: Registry[Family] = Registry(_all)


def loader_of(model_type: str) -> StockClass:
    """The stock class of a model with all that its files hold, as a record names it."""
    return FAMILIES[model_type].loader


def family_of(config: Config) -> Family:
    """The family of a model's config; a model that no cut can be made of is refused with the reason."""
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    reason = refusal(config)
    if reason is None and family is not None:
        reason = family.refusal(config)
    if reason is not None:
        raise ModelError(f"{model_type}: {reason}")
    if family is not None:
        return family
    known = f"the families are {', '.join(FAMILIES)}"
    if model_type is None:
        raise ModelError(f"config.json names no model_type; {known}")
    raise ModelError(f"{model_type} is not a linear-attention model that slimstate knows; {known}")


def logit_factor(config: Config) -> float:
    """What the logits of a model with this config are multiplied by."""
    return family_of(config).logit_factor(config)
