"""What a model card says about engines."""

from __future__ import annotations

from slimstate.families.contract import Config
from slimstate.serving.engines import Served, advice, date, warning

SERVING = """
## Serve it

What engines do with it, as of {date}; *run* names the command that shows it, *read* the source it was read in:

{rules}
"""


def serving_lines(config: Config) -> str:
    """The section on what engines make of a cut model, the last of the card; empty for a model that was not cut.

    Where no engine that is known can serve it, that is said first.
    """
    if (config.get("slimstate") or {}).get("key_dim") is None:
        return ""
    served = Served.of(config)
    lines = [f"- {rule.describe()}; `{rule.source}`" for rule in advice(served)]
    if (words := warning(served)) is not None:
        lines = [f"- **{words}**", *lines]
    return SERVING.format(date=date(), rules="\n".join(lines)) if lines else ""
