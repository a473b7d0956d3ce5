"""Write a benchmark's record with its tables and its figure."""

from __future__ import annotations

from pathlib import Path

from slimstate.benchmark.tables import as_latex, as_markdown
from slimstate.records.benchmark import BenchRecord
from slimstate.records.folder import check_drawn, check_record
from slimstate.system.atomic import check_place, staged_files, write_text


def check_output(folder: Path, name: str) -> None:
    """Raise before any work where the files of a benchmark could not be written later."""
    import slimstate.reports.plots  # noqa: F401  needs matplotlib

    check_place(folder, folder=True)
    check_record(folder / f"bench-{name}.json")
    check_drawn(folder, [f"bench-{name}.*"], beside=f"bench-{name}.json")


def write_output(record: BenchRecord, folder: Path) -> None:
    """Write `bench-NAME` as JSON, Markdown and LaTeX, and its figure."""
    from slimstate.benchmark.figures import figure_of
    from slimstate.reports.plots.style import save

    with staged_files(folder) as staging:
        path = staging / f"bench-{record.bench}"
        record.write(path.with_suffix(".json"))
        write_text(path.with_suffix(".md"), as_markdown(record))
        write_text(path.with_suffix(".tex"), as_latex(record))
        save(figure_of(record), path)
