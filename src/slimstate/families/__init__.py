"""The registry of architectures. A family reads a config and says where every key channel lives.

A new family is one module of this package, which lists one or more instances of a subclass of `Family` as
FAMILIES = (...). It is registered here and covered by the contract tests without another edit. Other packages announce
theirs as entry points of the group `slimstate.families`.
"""

import sys

from slimstate.core.stock_class import StockClass
from slimstate.families.contract import Config, Correction, Family
from slimstate.families.refused import REFUSED
from slimstate.system.errors import ModelError
from slimstate.system.plugins import Registry

__all__ = ["FAMILIES", "Config", "Correction", "Family", "family_of", "loader_of"]

FAMILIES: Registry[Family] = Registry(
    Family,  # type: ignore[type-abstract]
    sys.modules[__name__],
    "FAMILIES",
    name=lambda family: family.model_type,
    order=lambda family: family.library,
)


def loader_of(model_type: str) -> StockClass:
    """Return the stock class that loads a model with everything in its files."""
    return FAMILIES[model_type].loader


def family_of(config: Config) -> Family:
    """Return the family of a config; refuse a model that cannot be cut, with the reason."""
    model_type = config.get("model_type")
    if (reason := REFUSED.get(str(model_type))) is not None:
        raise ModelError(f"{model_type}: {reason}")
    if (family := FAMILIES.get(str(model_type))) is not None:
        return family
    supported = f"supported families: {', '.join(FAMILIES)}"
    if model_type is None:
        raise ModelError(f"config.json names no model_type; {supported}")
    raise ModelError(f"{model_type} is not a supported linear-attention model; {supported}")
