"""A cut by options that stand side by side, as on the command line: for tests that go through many of them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import slimstate
from slimstate import Budget, Calibration, CutOptions, LoadOptions
from slimstate.records.cut import CutRecord


def pruned(model: str | Path, out: str | Path | None = None, **flat: Any) -> CutRecord:
    """`slimstate.prune`, or with `apply` `slimstate.apply_plan`; every option goes to the value that has it."""
    if "apply" in flat:
        return slimstate.apply_plan(model, flat.pop("apply"), out, **flat)
    return slimstate.prune(model, out, **sorted_options(flat, options=CutOptions))


def estimated(model: str | Path, **flat: Any) -> Any:
    return slimstate.estimate(model, **sorted_options(flat))


def sorted_options(flat: dict[str, Any], **kinds: type) -> dict[str, Any]:
    """The arguments of a verb from options that stand side by side."""
    flat, given = dict(flat), {}
    for name, kind in {**kinds, "calibration": Calibration, "run": LoadOptions, "budget": Budget}.items():
        taken = {item.name: flat.pop(item.name) for item in fields(kind) if item.name in flat}
        if "seed" in taken and name != "calibration":
            flat["seed"] = taken["seed"]  # one seed for the choice and for the text
        if taken.get("data") is not None:
            taken["data"] = str(taken["data"])
        if taken:
            given[name] = kind(**taken)
    flat.pop("seed", None)
    return {**flat, **given}
