"""What lies beside the weights of a cut model, by name: for those who look for it and do not need torch to read it."""

from __future__ import annotations

PLAN = "slimstate_plan.json"
