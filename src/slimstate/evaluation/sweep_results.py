"""What a sweep has found: read again to go on with it, and the point it recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimstate.records.base import command
from slimstate.system.errors import DataError
from slimstate.system.json_files import read_json

SWEEP, EVIDENCE = "sweep.json", "evidence.safetensors"


def earlier_sweep(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What an interrupted sweep with the same settings has measured already."""
    if not path.exists():
        return {"kernels": None, "uncut": None, "rows": []}
    found = read_json(path)
    if not _can_go_on(found):
        raise DataError(f"{path} is not a sweep that can go on: choose another --out or remove it")
    theirs = found["settings"]
    different = [
        "model" if name == "fingerprint" else name
        for name, value in settings.items()
        if _essence(theirs.get(name)) != _essence(value)
    ]
    if different:
        raise DataError(f"{path} is a sweep with another {', '.join(different)}: choose another --out or remove it")
    return {"kernels": found.get("kernels"), "uncut": found["uncut"], "rows": found["rows"]}


def _essence(setting: Any) -> Any:
    """What of a setting decides a result: of a text its tokens, not where it lies."""
    return setting["digest"] if isinstance(setting, dict) and "digest" in setting else setting


def _can_go_on(found: dict[str, Any]) -> bool:
    """Whether rows and the uncut model are of the kind that this module writes."""
    uncut, rows = found.get("uncut"), found.get("rows")
    if not (isinstance(found.get("settings"), dict) and isinstance(uncut, dict) and isinstance(rows, list)):
        return False
    measured = [uncut, *rows]
    numbers = ("key_dim", "state_bytes", "perplexity", "nats_per_token", "rank_utilisation")
    return all(
        isinstance(entry, dict) and all(isinstance(entry.get(name), (int, float)) for name in numbers)
        for entry in measured
    ) and all(
        isinstance(row.get("method"), str)
        and isinstance(row.get("score"), str)
        and isinstance(row.get("compression"), (int, float))
        and isinstance(row.get("nats_over_uncut"), (int, float))
        and all(isinstance(row.get(name, ""), (int, float, type(None))) for name in ("kappa", "kappa_worst"))
        for row in rows
    )


def recommend(record: dict[str, Any], max_loss: float, folder: Path, model: str) -> dict[str, Any]:
    """The smallest state whose loss is within `max_loss`; where none is, the mildest loss, said to be none."""
    rows = record["rows"]
    within = [row for row in rows if row["nats_over_uncut"] <= max_loss]
    chosen = (
        min(within, key=lambda row: (row["state_bytes"], row["nats_over_uncut"]))
        if within
        else min(rows, key=lambda row: row["nats_over_uncut"])
    )
    share = 1 - chosen["state_bytes"] / record["uncut"]["state_bytes"]
    what = f"{chosen['method']} at key dim {chosen['key_dim']}: {share:.0%} less state for {chosen['nats_over_uncut']:+.3f} nats per token"  # noqa: E501
    if within:
        reason = f"{what}, the smallest state within {max_loss:g} nats of the uncut model"
    else:
        reason = f"no cut stays within {max_loss:g} nats of the uncut model; the mildest is {what}"
    options = {
        "out": "SLIM",
        "method": chosen["method"],
        "key_dim": chosen["key_dim"],
        "score": chosen["score"],
        "seed": record["settings"]["seed"],
        "rrqr_f": record["settings"]["f"],
        "evidence": folder / EVIDENCE if record["settings"]["calibration"] else None,
    }
    return {
        "row": rows.index(chosen),
        "within": bool(within),
        "max_loss": max_loss,
        "reason": reason,
        "command": command("prune", [model], options),
    }
