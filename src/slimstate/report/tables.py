"""A sweep as tables: CSV with every number; Markdown and LaTeX in the paper's layout.

The main table has a group of columns for each compression, the deepest first, and a line for each method; the ablation
has a column for each score. The best number of a column is bold, the second underlined.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slimstate.records.sweep import UNINFORMED, Row, SweepRecord
from slimstate.system.atomic import write_text

NAMES = {
    "random": "Rand", "l1": "L1", "s-wanda": "S-Wanda", "grad": "Grad", "drrqr": "DRRQR", "pca": "PCA (prop.)",
    "pca-adversarial": "PCA (adv.)", "pca-released": "PCA (released)",
    "pca-released-adversarial": "PCA (released, adv.)", "random-rotation": "Rand. rotation",
}  # fmt: skip
SCORES = {"kq": "K, Q", "k": "K", "q": "Q"}
FIELDS = (
    "method", "score", "compression", "key_dim", "state_bytes", "perplexity", "nats_per_token", "nats_over_uncut",
    "rank_utilisation", "kappa", "kappa_worst",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A column of the main table."""

    field: str
    title: str
    latex: str
    digits: str
    more_is_better: bool

    def of(self, row: Row) -> float | None:
        value: float | None = getattr(row, self.field)
        return value


METRICS = (
    Metric(field="perplexity", title="ppl ↓", latex=r"ppl $\downarrow$", digits=".2f", more_is_better=False),
    Metric(field="rank_utilisation", title="u ↑", latex=r"$u$ $\uparrow$", digits=".3f", more_is_better=True),
    Metric(field="kappa", title="κ ↓", latex=r"$\kappa$ $\downarrow$", digits=".3g", more_is_better=False),
)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Groups of columns, and lines of a name and cells; `baseline` is the last line's first cells."""

    groups: tuple[tuple[str, tuple[str, ...]], ...]
    lines: tuple[tuple[str, tuple[str, ...]], ...]
    baseline: tuple[str, ...]


def several_scores(sweep: SweepRecord) -> bool:
    """Whether channels were judged by more than one thing, which makes an ablation."""
    return len({row.score for row in sweep.rows if row.method not in UNINFORMED}) > 1


def write_tables(sweep: SweepRecord, folder: Path) -> list[Path]:
    """sweep.csv, sweep.md and sweep.tex; with several scores also ablation.md and ablation.tex."""
    texts = {
        "sweep.csv": as_csv(sweep.rows),
        "sweep.md": as_markdown(main_grid(sweep, latex=False)),
        "sweep.tex": as_latex(main_grid(sweep, latex=True)),
    }
    if several_scores(sweep):
        texts["ablation.md"] = as_markdown(ablation_grid(sweep, latex=False))
        texts["ablation.tex"] = as_latex(ablation_grid(sweep, latex=True))
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def as_csv(rows: Sequence[Row]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(FIELDS)
    writer.writerows([getattr(row, name) for name in FIELDS] for row in rows)
    return buffer.getvalue()


def main_grid(sweep: SweepRecord, latex: bool) -> Grid:
    """Methods by compressions, judged by the first score."""
    rows, uncut = sweep.rows, sweep.uncut
    score = "kq" if any(row.score == "kq" for row in rows) else rows[0].score
    judged = [row for row in rows if row.score == score or row.method in UNINFORMED]
    return _grid(
        rows,
        [(metric.latex if latex else metric.title, metric, judged) for metric in METRICS],
        (f"{uncut.perplexity:.2f}", f"{uncut.rank_utilisation:.3f}"),
        latex,
    )


def ablation_grid(sweep: SweepRecord, latex: bool) -> Grid:
    """Perplexity by method and by what channels are judged by, a group for each compression."""
    rows = [row for row in sweep.rows if row.method not in UNINFORMED]
    by_score = {score: [row for row in rows if row.score == score] for score in SCORES}
    columns = [(SCORES[score], METRICS[0], judged) for score, judged in by_score.items() if judged]
    return _grid(rows, columns, (f"{sweep.uncut.perplexity:.2f}",), latex)


def _grid(
    rows: Sequence[Row],
    columns: Sequence[tuple[str, Metric, Sequence[Row]]],
    baseline: tuple[str, ...],
    latex: bool,
) -> Grid:
    """A group for each compression, the deepest first, with these columns: a title, a metric and the rows it is of."""
    compressions = sorted({row.compression for row in rows}, reverse=True)
    methods = list(dict.fromkeys(row.method for row in rows))
    cells = [
        _column(metric, {row.method: row for row in judged if row.compression == compression}, methods, latex)
        for compression in compressions
        for _, metric, judged in columns
    ]
    percent = r"\%" if latex else "%"
    titles = tuple(title for title, _, _ in columns)
    return Grid(
        groups=tuple((f"{100 * compression:g}{percent} compression", titles) for compression in compressions),
        lines=tuple(
            (NAMES.get(method, method), tuple(column[number] for column in cells))
            for number, method in enumerate(methods)
        ),
        baseline=baseline,
    )


def _column(metric: Metric, rows: Mapping[str, Row], methods: Sequence[str], latex: bool) -> list[str]:
    """The cells of one column, its best and second best marked."""
    values = {method: metric.of(rows[method]) if method in rows else None for method in methods}
    known = sorted({value for value in values.values() if value is not None}, reverse=metric.more_is_better)
    marks = [(r"\textbf{%s}", r"\underline{%s}"), ("**%s**", "<u>%s</u>")][not latex]
    cells = []
    for method in methods:
        value = values[method]
        cell = "--" if value is None else format(value, metric.digits)
        rank = known.index(value) if value is not None and len(known) > 1 else 2
        cells.append(marks[rank] % cell if rank < 2 else cell)
    return cells


def as_markdown(grid: Grid) -> str:
    titles = [f"{group}: {title}" for group, names in grid.groups for title in names]
    lines = [["Method", *titles], ["---"] * (len(titles) + 1), *([name, *cells] for name, cells in grid.lines)]
    lines.append(["Baseline", *grid.baseline, *["—"] * (len(titles) - len(grid.baseline))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def as_latex(grid: Grid) -> str:
    """A tabular that needs booktabs."""
    width = len(grid.groups[0][1])
    head = " & ".join(rf"\multicolumn{{{width}}}{{c}}{{\textbf{{{group}}}}}" for group, _ in grid.groups)
    rules = " ".join(rf"\cmidrule(lr){{{2 + i * width}-{1 + (i + 1) * width}}}" for i in range(len(grid.groups)))
    titles = " & ".join(["Method", *(title for _, names in grid.groups for title in names)])
    body = [" & ".join([name, *cells]) + r" \\" for name, cells in grid.lines]
    empty = len(grid.groups) * width - len(grid.baseline)
    baseline = " & ".join(["Baseline", *grid.baseline, *["--"] * empty]) + r" \\"
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l {' '.join(['c' * width] * len(grid.groups))}}}",
            r"\toprule",
            rf" & {head} \\",
            rules,
            rf"{titles} \\",
            r"\midrule",
            *body,
            r"\midrule",
            baseline,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )
