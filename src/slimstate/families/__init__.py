"""The registry of architectures. A family reads a config and says where every key channel lives.

A new family is a module of this package and nothing else: one with the names of the `Family` contract, or with values
that have them, listed in its FAMILIES. It is found here by itself, and the contract tests run on it by themselves.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator

from slimstate.core.layout import HookPoint
from slimstate.core.stock_class import StockClass
from slimstate.families.contract import Config, Correction, Encloses, Family, Refuses, ScalesLogits
from slimstate.families.refused import refusal
from slimstate.system.errors import ModelError

__all__ = [
    "FAMILIES",
    "Config",
    "Correction",
    "Family",
    "by_model_type",
    "family_of",
    "found_in",
    "hook_of",
    "language_of",
    "loader_of",
    "logit_factor",
]

CONTRACT = tuple(name for name in vars(Family) if not name.startswith("_"))


def found_in(package: str, places: Iterable[str]) -> Iterator[Family]:
    """The families that the modules of a package offer, by the names of the modules; others are parts they share."""
    for name in sorted(module.name for module in pkgutil.iter_modules(places)):
        module = importlib.import_module(f"{package}.{name}")
        for candidate in getattr(module, "FAMILIES", (module,) if hasattr(module, "model_type") else ()):
            missing = [member for member in CONTRACT if not hasattr(candidate, member)]
            if missing:
                raise TypeError(f"{module.__name__} offers a family without {', '.join(missing)}")
            yield candidate


def by_model_type(families: Iterable[Family]) -> dict[str, Family]:
    """Those of one library together; no two families have one model type."""
    found: dict[str, Family] = {}
    for family in sorted(families, key=lambda family: family.library):
        if family.model_type in found:
            raise TypeError(f"two families of model type {family.model_type}")
        found[family.model_type] = family
    return found


FAMILIES: dict[str, Family] = by_model_type(found_in(__name__, __path__))


def language_of(family: Family) -> str:
    """The model type whose class runs the language model alone."""
    return (family.language if isinstance(family, Encloses) else None) or family.model_type


def loader_of(model_type: str) -> StockClass:
    """The stock class of a model with all that its files hold, as a record names it."""
    family = FAMILIES[model_type]
    alone = language_of(family) == model_type
    return StockClass(library=family.library, name="AutoModelForCausalLM" if alone else "AutoModelForImageTextToText")


def hook_of(family: Family) -> HookPoint:
    """The functions that the layers of a family call; they are the same for every config."""
    config = {"model_type": family.model_type, **family.DEFAULTS, "text_config": dict(family.DEFAULTS)}
    return family.mixers(config)[0].hook


def family_of(config: Config) -> Family:
    """The family of a model's config; a model that no cut can be made of is refused with the reason."""
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    reason = refusal(config)
    if reason is None and isinstance(family, Refuses):
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
    family = family_of(config)
    return family.logit_factor(config) if isinstance(family, ScalesLogits) else 1.0
