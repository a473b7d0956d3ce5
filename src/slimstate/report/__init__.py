"""One page from records: what was swept, cut, recovered, traced and evaluated, in one HTML file without any network.

Records are all it sees: nothing here loads a model. Each section of the page is a module that turns records into
`Html`, which escapes what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slimstate.records.display import Displayable
from slimstate.records.folder import Found, Records, read_records
from slimstate.records.reconstruction import RECONSTRUCTION
from slimstate.records.training import RECOVERY
from slimstate.report.markup import GENERATOR
from slimstate.system.atomic import check_place, write_text, writing
from slimstate.system.errors import DataError, OutputError
from slimstate.system.progress import SILENT, Reporter

if TYPE_CHECKING:
    from slimstate.records.plan import Plan

__all__ = ["WrittenReport", "write_report"]
PAGE = "report.html"
MOST_HEAD = 4096  # bytes in which a page says who made it
MAKERS = "`slimstate sweep`, `analyze`, `eval` and `verify` with `out`, `prune`, `reconstruct` and `recover` make them"


@dataclass(frozen=True, kw_only=True)
class WrittenReport(Displayable):
    """The page, how many records of each kind it is from, and a line on each file that could not be used."""

    out: str
    records: Mapping[str, int]
    skipped: tuple[str, ...]
    bytes: int

    def headline(self) -> str:
        return "a page of " + ", ".join(f"{count} {kind}" for kind, count in self.records.items())

    def table(self) -> list[dict[str, object]]:
        """What could not be used."""
        return [{"skipped": line} for line in self.skipped]


def write_report(folder: str | Path, out: str | Path | None = None, *, reporter: Reporter = SILENT) -> WrittenReport:
    """One self-contained HTML page from whatever records are under `folder`; by default, `report.html` in it."""
    import slimstate.report.plots  # noqa: F401  matplotlib is an extra, and missing it is said in a line
    from slimstate.report.rendering import render

    folder = Path(folder)
    if folder.is_file():
        raise DataError(f"{folder} is a file; give the folder that holds records")
    target = Path(out) if out is not None else folder / PAGE
    _check_page(target)
    records = usable_records(folder)
    for line in records.skipped:
        reporter.say(line)
    if not records.counts():
        why = f" that can be used: {records.skipped[0]}" if records.skipped else f": {MAKERS}"
        raise DataError(f"no record under {folder}{why}")
    with reporter.waiting("drawing"):
        text = render(records, folder)
    write_text(target, text)
    return WrittenReport(out=str(target), records=records.counts(), skipped=records.skipped, bytes=len(text.encode()))


def _check_page(path: Path) -> None:
    """Refuse a place where no page can be written, or to replace a file that is none of ours."""
    check_place(path, folder=False)
    if not path.exists():
        return
    with writing(path), path.open("rb") as file:
        ours = GENERATOR.encode() in file.read(MOST_HEAD)
    if not ours:
        raise OutputError(f"{path} is no page that slimstate wrote, and is not replaced: choose another place")


def usable_records(folder: Path) -> Records:
    """What a page is made from: every record once."""
    records = read_records(folder)
    return replace(records, plan=without_copies(records.plan))


def without_copies(plans: Sequence[Found[Plan]]) -> tuple[Found[Plan], ...]:
    """Plans, less those that `analyze`, `reconstruct` or `recover` copied where the cut model itself is here too."""

    def copied(plan: Found[Plan]) -> bool:
        trained = any((plan.path.parent / name).exists() for name in (RECONSTRUCTION, RECOVERY))
        return plan.record.folder is not None or trained

    here = [plan.record for plan in plans if not copied(plan)]
    return tuple(plan for plan in plans if not copied(plan) or not any(map(plan.record.same_cut, here)))
