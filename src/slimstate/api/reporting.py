"""One page of records. It is imported with the package, and loads neither torch nor a model."""

from __future__ import annotations

from pathlib import Path

from slimstate.report import WrittenReport, write_report
from slimstate.workflows.inputs import Progress, reporter_for


def report(folder: str | Path, out: str | Path | None = None, *, progress: Progress = True) -> WrittenReport:
    """One page of whatever records a folder holds; it loads no model and needs no network.

    Parameters:
        folder: where the records lie, at any depth: those of sweeps, analyses, evaluations, cuts and trainings.
        out: the page; by default `report.html` in the folder.
        progress: whether to show it; or a `Reporter` of your own.

    Returns:
        Where the page is (`path`), how many records of each kind it is from, and what could not be used.

    Examples:
        >>> slimstate.report("records").path
    """
    return write_report(folder, out, reporter=reporter_for(progress))
