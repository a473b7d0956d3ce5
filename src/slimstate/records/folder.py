"""The records in a folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimstate.core.plan import PLAN
from slimstate.records.training import RECOVERY
from slimstate.system.errors import DataError

KINDS = ("sweep", "plan", "recovery", "trace", "filters", "evaluation")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A record and the file it came from."""

    path: Path
    kind: str
    data: dict[str, Any]


def read_records(folder: Path) -> tuple[list[Found], list[str]]:
    """Every record under a folder, and a line on each file that looked like one and could not be read.

    Of a model folder only what slimstate wrote is read; JSON files that are no record are passed over.
    """
    if not folder.is_dir():
        raise DataError(f"no folder {folder}")
    found, complaints = [], []
    for path in sorted(folder.rglob("*.json")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or ((path.parent / "config.json").exists() and path.name not in (PLAN, RECOVERY)):
            continue
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            complaints.append(f"{path} was skipped: it is not JSON ({error})")
            continue
        kind = "plan" if path.name == PLAN else data.get("kind") if isinstance(data, dict) else None
        if kind in KINDS:
            found.append(Found(path=path, kind=str(kind), data=data))
    return found, complaints
