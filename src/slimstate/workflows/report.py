"""`slimstate report`: one HTML page of all records in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slimstate.workflows.inputs import Progress, reporter_for

if TYPE_CHECKING:
    from slimstate.report import WrittenReport


def report(folder: str | Path, out: str | Path | None = None, *, progress: Progress = True) -> WrittenReport:
    """Write one HTML page from the records in a folder; no model is loaded, and the page needs no network.

    Parameters:
        folder: Folder with records of sweep, analyze, eval, verify, prune, reconstruct, recover, at any depth.
        out: The page; default: report.html in the folder.

    Returns:
        Where the page is (`path`), the number of records of each kind, and what could not be used.

    Examples:
        >>> slimstate.report("records").path
    """
    from slimstate.report import write_report

    return write_report(folder, out, reporter=reporter_for(progress))
