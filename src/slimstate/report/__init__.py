"""One page from records: what was swept, cut, recovered, traced and evaluated, in one HTML file without any network.

Records are all it sees: nothing here loads a model. `shapes` says what a record must hold to be drawn; each section of
the page is a module that turns records into `Html`, which escapes what it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimstate.records.folder import Found, read_records
from slimstate.records.training import RECOVERY
from slimstate.report.shapes import SHAPES, complaint
from slimstate.system.atomic import write_text
from slimstate.system.errors import DataError
from slimstate.system.progress import SILENT, Reporter

__all__ = ["write_report"]
PAGE = "report.html"
MAKERS = "`slimstate sweep`, `analyze`, `eval --out`, `prune` and `recover` make them"


def write_report(folder: str | Path, out: str | Path | None = None, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """One self-contained HTML page from whatever records are under `folder`; by default, `report.html` in it."""
    from slimstate.report.rendering import render  # matplotlib is an extra

    folder = Path(folder)
    target = Path(out) if out is not None else folder / PAGE
    records, skipped = usable_records(folder)
    for line in skipped:
        reporter.say(line)
    if not records:
        why = f" that can be used: {skipped[0]}" if skipped else f": {MAKERS}"
        raise DataError(f"no record under {folder}{why}")
    with reporter.waiting("drawing"):
        text = render(records, skipped, folder)
    write_text(target, text)
    counts = {kind: len(found) for kind, found in records.items()}
    return {"out": str(target), "records": counts, "skipped": skipped, "bytes": len(text.encode())}


def usable_records(folder: Path) -> tuple[dict[str, list[Found]], list[str]]:
    """Records by kind, and a line on each file that cannot be used."""
    everything, skipped = read_records(folder)
    records: dict[str, list[Found]] = {}
    for found in everything:
        if lack := complaint(found):
            skipped.append(f"{found.path} was skipped: as a record of a {found.kind}, {lack}")
        else:
            records.setdefault(found.kind, []).append(found)
    records["plan"] = without_copies(records.get("plan", ()))
    return {kind: records[kind] for kind in SHAPES if records.get(kind)}, skipped


def without_copies(plans: Sequence[Found]) -> list[Found]:
    """Plans, less those that `analyze` or `recover` copied where the cut model itself is here too."""

    def copied(plan: Found) -> bool:
        return "folder" in plan.data or (plan.path.parent / RECOVERY).exists()

    here = [plan.data["layers"] for plan in plans if not copied(plan)]
    return [plan for plan in plans if not copied(plan) or plan.data["layers"] not in here]
