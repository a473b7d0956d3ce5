"""The section of a model card about serving engines."""

from __future__ import annotations

from slimstate.checkpoints.model_card import render
from slimstate.families.contract import Config
from slimstate.serving.engines import ServedModel, rule_book, rules_for, warning


def serving_lines(config: Config) -> str:
    """Return what engines do with a cut model, first whether none can serve it; nothing for an uncut model."""
    if (config.get("slimstate") or {}).get("key_dim") is None:
        return ""
    model = ServedModel.at_key_dim(config)
    rules, line = rules_for(model), warning(model)
    return render("serving.md", date=rule_book().date, rules=rules, warning=line) if rules or line else ""
