"""Models that multiply what their output head gives out: a loss made from hidden states and head has to do so too."""

from __future__ import annotations

from slimstate.families.contract import Config


def logit_factor(config: Config) -> float:
    """What the logits of a model with this config are multiplied by."""
    if config.get("model_type") == "granitemoehybrid":
        return 1 / float(config.get("logits_scaling", 1.0))
    if config.get("model_type") == "falcon_h1":
        return float(config.get("lm_head_multiplier", 1.0))
    return 1.0
