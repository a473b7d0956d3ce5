"""What a model card says about speed and about engines. Both are empty where nothing is known."""

from __future__ import annotations

from slimstate.serving.engines import advice, date
from slimstate.serving.widths import speed_of_cut

SERVING = """
## Serve it

What was found in the sources of serving engines on {date}:

{rules}
"""


def speed_lines(model_type: str, width: int, key_dim: int) -> str:
    """What a cut gains, as lines below the sizes."""
    speed = speed_of_cut(model_type, width, key_dim)
    return "" if speed is None else f"\nSpeed: {speed.speedup:.2f}x ({speed.source}).\n"


def serving_lines(model_type: str, key_dim: int | None) -> str:
    """The section on what engines make of a cut model, the last of the card; None is a model that was not cut."""
    found = () if key_dim is None else advice(model_type, key_dim)
    rules = "\n".join(f"- {rule.describe()}; `{rule.source}`" for rule in found)
    return SERVING.format(date=date(), rules=rules) if found else ""
