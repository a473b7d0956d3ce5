"""What a model card says about engines."""

from __future__ import annotations

from slimstate.serving.engines import advice, date

SERVING = """
## Serve it

What was found in the sources of serving engines on {date}:

{rules}
"""


def serving_lines(model_type: str, key_dim: int | None) -> str:
    """The section on what engines make of a cut model, the last of the card; None is a model that was not cut."""
    found = () if key_dim is None else advice(model_type, key_dim)
    rules = "\n".join(f"- {rule.describe()}; `{rule.source}`" for rule in found)
    return SERVING.format(date=date(), rules=rules) if found else ""
