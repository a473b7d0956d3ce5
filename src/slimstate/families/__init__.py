"""The registry of architectures. A family reads a config and says where every key channel lives.

A new family is a module with the names of the `Family` contract, or a value with them, listed in FAMILIES below; the
contract tests then run on it by themselves.
"""

from __future__ import annotations

from slimstate.axes import Tap
from slimstate.errors import ModelError
from slimstate.families import (
    comba,
    delta_net,
    gated_deltanet,
    gated_deltaproduct,
    gla,
    kda,
    linear_attn,
    mamba2,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
)
from slimstate.families.contract import Config, Correction, Family
from slimstate.families.logits import logit_factor
from slimstate.families.refused import refusal

__all__ = ["FAMILIES", "Config", "Correction", "Family", "family_of", "logit_factor", "tap_of"]

LISTED: tuple[Family, ...] = (
    delta_net,
    gated_deltanet,
    *qwen3_next.FAMILIES,
    *qwen3_5.FAMILIES,
    *olmo_hybrid.FAMILIES,
    *mamba2.FAMILIES,
    kda,
    gla,
    gated_deltaproduct,
    comba,
    linear_attn,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in LISTED}


def tap_of(family: Family) -> Tap:
    """The functions that the layers of a family call; they are the same for every config."""
    config = {"model_type": family.model_type, **family.DEFAULTS, "text_config": dict(family.DEFAULTS)}
    return family.mixers(config)[0].tap


def family_of(config: Config) -> Family:
    """The family of a model's config; a model that no cut can be made of is refused with the reason."""
    model_type = config.get("model_type")
    if (reason := refusal(config)) is not None:
        raise ModelError(f"{model_type}: {reason}")
    if model_type in FAMILIES:
        return FAMILIES[str(model_type)]
    known = f"the families are {', '.join(FAMILIES)}"
    if model_type is None:
        raise ModelError(f"config.json names no model_type; {known}")
    raise ModelError(f"{model_type} is not a linear-attention model that slimstate knows; {known}")
