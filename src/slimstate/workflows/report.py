"""`slimstate report`: one HTML page of all records in a folder."""

from collections.abc import Mapping
from pathlib import Path

from slimstate.records.base import Displayable
from slimstate.system.atomic import check_place, write_text, writing
from slimstate.system.errors import DataError, OutputError
from slimstate.system.options import as_path
from slimstate.workflows.inputs import Progress, reporter_for

PAGE = "report.html"
GENERATOR = b'<meta name="generator" content="slimstate">'  # marks a page as ours
MAX_HEAD_BYTES = 4096  # where that mark must be
SOURCES = (
    "`sweep`, `analyze`, `eval`, `verify` and `bench` with `out`, `prune`, `reconstruct`, `recover` and `train` write"
    " records"
)


class WrittenReport(Displayable):
    """The page, the number of records of each kind on it, and a line for each file that could not be read."""

    out: str
    records: Mapping[str, int]
    skipped: tuple[str, ...]
    bytes: int

    def headline(self) -> str:
        records = ", ".join(f"{kind} ({count})" for kind, count in self.records.items())
        return f"a page of {self.bytes / 1024:.0f} KiB from these records: {records}"

    def table(self) -> list[dict[str, object]]:
        """Return the files that could not be read."""
        return [{"skipped": line} for line in self.skipped]


def report(folder: str | Path, out: str | Path | None = None, *, progress: Progress = True) -> WrittenReport:
    """Write one HTML page from the records in a folder; no model is loaded, and the page needs no network.

    Parameters:
        folder: Folder with records of any command that writes one, at any depth.
        out: The page; default: report.html in the folder.

    Returns:
        Where the page is (`path`), the number of records of each kind, and what could not be used.

    Examples:
        >>> slimstate.report("records").path
    """
    from slimstate.reports.page import render, unique_records

    folder, reporter = as_path(folder, "folder"), reporter_for(progress)
    if folder.is_file():
        raise DataError(f"the report needs a folder of records, and {folder} is a file")
    target = as_path(out) if out is not None else folder / PAGE
    check_place(target, folder=False)
    if target.exists():
        with writing(target), target.open("rb") as file:
            if GENERATOR not in file.read(MAX_HEAD_BYTES):
                raise OutputError(f"{target} is not a slimstate report and is not replaced: choose another place")
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
