"""Write one self-contained HTML page from records. Nothing here loads a model.

Each section of the page is a module that computes plain values from records, and a template that shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slimstate.records.base import Displayable
from slimstate.records.folder import RecordFile, Records, read_records
from slimstate.records.training import RECONSTRUCTION, RECOVERY
from slimstate.system.atomic import check_place, write_text, writing
from slimstate.system.errors import DataError, OutputError
from slimstate.system.progress import SILENT, Reporter

if TYPE_CHECKING:
    from slimstate.records.plan import Plan

__all__ = ["WrittenReport", "write_report"]
PAGE = "report.html"
GENERATOR = b'<meta name="generator" content="slimstate">'  # marks a page as ours
MAX_HEAD_BYTES = 4096  # where that mark must be
SOURCES = "`sweep`, `analyze`, `eval` and `verify` with `out`, `prune`, `reconstruct` and `recover` write records"


@dataclass(frozen=True, kw_only=True)
class WrittenReport(Displayable):
    """The page, the number of records of each kind on it, and a line for each file that could not be read."""

    out: str
    records: Mapping[str, int]
    skipped: tuple[str, ...]
    bytes: int

    def headline(self) -> str:
        records = ", ".join(f"{count} {kind}" for kind, count in self.records.items())
        return f"a page of {self.bytes / 1024:.0f} KiB from these records: {records}"

    def table(self) -> list[dict[str, object]]:
        """Return the files that could not be read."""
        return [{"skipped": line} for line in self.skipped]


def write_report(folder: str | Path, out: str | Path | None = None, *, reporter: Reporter = SILENT) -> WrittenReport:
    """Write one HTML page from all records under `folder`, by default to `report.html` in it."""
    import slimstate.report.plots  # noqa: F401  fails with one line where matplotlib, an extra, is missing
    from slimstate.report.page import render

    folder = Path(folder)
    if folder.is_file():
        raise DataError(f"the report needs a folder of records, and {folder} is a file")
    target = Path(out) if out is not None else folder / PAGE
    _check_page(target)
    records = unique_records(folder)
    for line in records.skipped:
        reporter.say(line)
    if not records.counts():
        reason = f" that can be read: {records.skipped[0]}" if records.skipped else f": {SOURCES}"
        raise DataError(f"no record under {folder}{reason}")
    with reporter.waiting("drawing"):
        text = render(records, folder)
    write_text(target, text)
    return WrittenReport(out=str(target), records=records.counts(), skipped=records.skipped, bytes=len(text.encode()))


def _check_page(path: Path) -> None:
    """Refuse a place where no page can be written, and a file that is not a page of ours."""
    check_place(path, folder=False)
    if not path.exists():
        return
    with writing(path), path.open("rb") as file:
        is_ours = GENERATOR in file.read(MAX_HEAD_BYTES)
    if not is_ours:
        raise OutputError(f"{path} is not a slimstate report and is not replaced: choose another place")


def unique_records(folder: Path) -> Records:
    """Return the records under a folder, without copies of plans.

    `analyze`, `reconstruct` and `recover` copy the plan of a cut model, whose own plan may be there too.
    """
    records = read_records(folder)

    def is_copy(plan: RecordFile[Plan]) -> bool:
        is_trained = any((plan.path.parent / name).exists() for name in (RECONSTRUCTION, RECOVERY))
        return plan.record.folder is not None or is_trained

    originals = [plan.record for plan in records.plan if not is_copy(plan)]
    unique = [plan for plan in records.plan if not is_copy(plan) or not any(map(plan.record.same_cut, originals))]
    return replace(records, plan=tuple(unique))
