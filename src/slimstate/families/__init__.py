"""The registry of architectures. A family is a module that reads a config and says where every key channel lives.

A new family is one module with the names of the `Family` contract, listed in FAMILIES below; the contract tests
then run on it by themselves.
"""

from __future__ import annotations

from typing import Any, Protocol

from slimstate.axes import Mixer
from slimstate.errors import ModelError
from slimstate.families import delta_net, gated_deltanet
from slimstate.families.fla_layout import Config


class Family(Protocol):
    model_type: str

    def mixers(self, config: Config) -> tuple[Mixer, ...]:
        """Every linear-attention layer of a model with this config."""

    def softmax_layers(self, config: Config) -> frozenset[int]:
        """The layers that are left alone."""

    def resize(self, config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
        """The config of the same model with `key_dim` channels per head.

        `corrected` also changes what must change for the layers to give out what they gave with channels zeroed.
        """


FAMILIES: dict[str, Family] = {family.model_type: family for family in (delta_net, gated_deltanet)}

# linear-attention architectures that a later version may cut
# fmt: off
NOT_YET = frozenset((
    "bailing_hybrid", "bamba", "comba", "falcon_h1", "gated_deltaproduct", "gdn2", "gla", "glm5_next",
    "granitemoehybrid", "kda", "kimi_linear", "linear_attn", "mamba2", "mesa_net", "minimax", "nemotron_h",
    "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp",
    "qwen4_exp_text", "retnet", "rwkv7", "zamba2",
))
# fmt: on


def family_of(config: Config) -> Family:
    """The family of a model's config."""
    model_type = config.get("model_type")
    if model_type in FAMILIES:
        return FAMILIES[str(model_type)]
    known = f"the families are {', '.join(FAMILIES)}"
    if model_type in NOT_YET:
        raise ModelError(f"{model_type} is a linear-attention model that is not supported yet; {known}")
    if model_type is None:
        raise ModelError(f"config.json names no model_type; {known}")
    raise ModelError(f"{model_type} is not a linear-attention model that slimstate knows; {known}")
