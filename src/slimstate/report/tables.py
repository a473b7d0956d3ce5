"""A sweep as tables: CSV with every number; Markdown and LaTeX in the paper's layout.

The main table has a group of columns for each key dim and type of the state, the smallest first, and a line for each
method; the ablation has a column for each score. Perplexities are per word where that is known, as the paper's are, and
titles say so. The best number of a column is bold, the second underlined.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slimstate.records.sweep import UNCUT, UNINFORMED, Row, SweepRecord, Uncut
from slimstate.report.numbers import HUGE
from slimstate.system.atomic import write_text

NAMES = {
    "random": "Rand", "l1": "L1", "s-wanda": "S-Wanda", "grad": "Grad", "drrqr": "DRRQR", "pca": "PCA (prop.)",
    "pca-adversarial": "PCA (adv.)", "pca-released": "PCA (released)",
    "pca-released-adversarial": "PCA (released, adv.)", "random-rotation": "Rand. rotation", UNCUT: "Uncut",
}  # fmt: skip
SCORES = {"kq": "K, Q", "k": "K", "q": "Q"}
FIELDS = (
    "method", "score", "compression", "key_dim", "state_dtype", "state_bytes", "perplexity", "word_perplexity",
    "bits_per_byte", "nats_per_token", "nats_over_uncut", "rank_utilisation", "kappa", "kappa_worst", "tokens",
    "words", "bytes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A column of the main table: a field of the rows, or a metric of lm-eval's by its name."""

    field: str
    title: str
    latex: str
    digits: str
    more_is_better: bool
    of_task: bool = False
    words: str = ""  # what it is called where there is room

    def of(self, measured: Row | Uncut) -> float | None:
        if self.of_task:
            return task_values(measured).get(self.field)
        value: float | None = getattr(measured, self.field, None)
        return value

    def shown(self, value: float | None) -> str:
        return "--" if value is None else format(value, self.digits if value < HUGE else ".3g")


PER_TOKEN = Metric(
    field="perplexity", title="token ppl ↓", latex=r"token ppl $\downarrow$", digits=".2f", more_is_better=False,
    words="perplexity per token",
)  # fmt: skip
PER_WORD = Metric(
    field="word_perplexity", title="word ppl ↓", latex=r"word ppl $\downarrow$", digits=".2f", more_is_better=False,
    words="perplexity per word",
)  # fmt: skip
UTILISATION = Metric(field="rank_utilisation", title="u ↑", latex=r"$u$ $\uparrow$", digits=".3f", more_is_better=True)
KAPPA = Metric(field="kappa", title="κ ↓", latex=r"$\kappa$ $\downarrow$", digits=".3g", more_is_better=False)


def perplexity_metric(sweep: SweepRecord) -> Metric:
    """Per word, where all of a sweep's perplexities are known so; per token in sweeps of 0.1."""
    known = sweep.uncut.word_perplexity is not None and all(
        row.word_perplexity is not None for row in sweep.rows if row.perplexity is not None
    )
    return PER_WORD if known else PER_TOKEN


def task_metrics(sweep: SweepRecord) -> list[Metric]:
    """One of each task that the candidates were given."""
    return [
        Metric(
            field=measure.name,
            title=f"{measure.name} {'↑' if measure.more_is_better else '↓'}",
            latex=measure.name.replace("_", r"\_") + (r" $\uparrow$" if measure.more_is_better else r" $\downarrow$"),
            digits=".3f" if measure.more_is_better else ".2f",
            more_is_better=bool(measure.more_is_better),
            of_task=True,
        )
        for measure in (() if sweep.uncut.lm_eval is None else sweep.uncut.lm_eval.chief_measures())
    ]


def task_values(measured: Row | Uncut) -> dict[str, float | None]:
    """Every metric of every task, by its name."""
    return {} if measured.lm_eval is None else {found.name: found.value for found in measured.lm_eval.measures()}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Groups of columns, lines of a name and cells, and the last line: the uncut model, a cell for every column."""

    caption: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    lines: tuple[tuple[str, tuple[str, ...]], ...]
    baseline: tuple[str, ...]


def caption_of(sweep: SweepRecord) -> str:
    """In which unit the perplexities of a table are, and what they rest on."""
    if perplexity_metric(sweep) is PER_TOKEN:
        return "Perplexity is per token; the paper's WikiText columns are per word, and do not compare with it."
    counts, text = sweep.uncut.counts, None if sweep.settings.text is None else sweep.settings.text.data
    measured = f": {counts}{f' of {text}' if text else ''}" if counts else ""
    return f"Perplexity is per word, as in the paper's WikiText columns{measured}."


def several_scores(sweep: SweepRecord) -> bool:
    """Whether channels were judged by more than one thing, which makes an ablation."""
    return len({row.score for row in sweep.rows if row.method not in (UNCUT, *UNINFORMED)}) > 1


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
    tasks = list(dict.fromkeys(name for row in rows for name in task_values(row)))
    writer.writerow([*FIELDS, *tasks])
    for row in rows:
        found = task_values(row)
        writer.writerow([*(getattr(row, name) for name in FIELDS), *map(found.get, tasks)])
    return buffer.getvalue()


def main_grid(sweep: SweepRecord, latex: bool) -> Grid:
    """Methods by key dims, judged by the first score."""
    rows = sweep.rows
    score = "kq" if any(row.score == "kq" for row in rows) else rows[0].score
    judged = [row for row in rows if row.score == score or row.method in (UNCUT, *UNINFORMED)]
    metrics = [perplexity_metric(sweep), *task_metrics(sweep), UTILISATION]
    return _grid(
        caption_of(sweep),
        rows,
        [(metric.latex if latex else metric.title, metric, judged) for metric in (*metrics, KAPPA)],
        (*(metric.shown(metric.of(sweep.uncut)) for metric in metrics), "--"),
        latex,
    )


def ablation_grid(sweep: SweepRecord, latex: bool) -> Grid:
    """Perplexity by method and by what channels are judged by, a group for each key dim."""
    metric = perplexity_metric(sweep)
    rows = [row for row in sweep.rows if row.method not in (UNCUT, *UNINFORMED)]
    by_score = {score: [row for row in rows if row.score == score] for score in SCORES}
    unit = "word" if metric is PER_WORD else "token"
    columns = [(f"{SCORES[score]}, {unit} ppl", metric, judged) for score, judged in by_score.items() if judged]
    uncut = metric.shown(metric.of(sweep.uncut))
    return _grid(caption_of(sweep), rows, columns, (uncut,) * len(columns), latex)


def _grid(
    caption: str,
    rows: Sequence[Row],
    columns: Sequence[tuple[str, Metric, Sequence[Row]]],
    uncut: tuple[str, ...],
    latex: bool,
) -> Grid:
    """A group for each size of state, the smallest first, with columns of a title, a metric and the rows it is of.

    `uncut` has a cell for each of these columns, and stands under every group.
    """
    sizes = {_size(row): row.compression for row in rows}
    methods = list(dict.fromkeys(row.method for row in rows))
    cells = [
        _column(metric, {row.method: row for row in judged if _size(row) == size}, methods, latex)
        for size in sorted(sizes)
        for _, metric, judged in columns
    ]
    percent = r"\%" if latex else "%"
    titles = tuple(title for title, _, _ in columns)
    return Grid(
        caption=caption,
        groups=tuple(
            (f"{100 * sizes[size]:.3g}{percent} compression ({_told(size, latex)})", titles) for size in sorted(sizes)
        ),
        lines=tuple(
            (NAMES.get(method, method), tuple(column[number] for column in cells))
            for number, method in enumerate(methods)
        ),
        baseline=uncut * len(sizes),
    )


def _size(row: Row) -> tuple[float, int, str]:
    return row.state_bytes, row.key_dim, row.state_dtype


def _told(size: tuple[float, int, str], latex: bool) -> str:
    _, key_dim, state_dtype = size
    kept = "" if state_dtype == "float32" else f", state in {state_dtype}"
    return f"key dim {key_dim}{kept.replace('_', chr(92) + '_') if latex else kept}"


def _column(metric: Metric, rows: Mapping[str, Row], methods: Sequence[str], latex: bool) -> list[str]:
    """The cells of one column, its best and second best marked."""
    values = {method: metric.of(rows[method]) if method in rows else None for method in methods}
    known = sorted({value for value in values.values() if value is not None}, reverse=metric.more_is_better)
    marks = [(r"\textbf{%s}", r"\underline{%s}"), ("**%s**", "<u>%s</u>")][not latex]
    cells = []
    for method in methods:
        value = values[method]
        cell = metric.shown(value)
        rank = known.index(value) if value is not None and len(known) > 1 else 2
        cells.append(marks[rank] % cell if rank < 2 else cell)
    return cells


def as_markdown(grid: Grid) -> str:
    titles = [f"{group}: {title}" for group, names in grid.groups for title in names]
    lines = [["Method", *titles], ["---"] * (len(titles) + 1), *([name, *cells] for name, cells in grid.lines)]
    lines.append(["Baseline", *grid.baseline])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{grid.caption}\n"


def as_latex(grid: Grid) -> str:
    """A tabular that needs booktabs."""
    width = len(grid.groups[0][1])
    head = " & ".join(rf"\multicolumn{{{width}}}{{c}}{{\textbf{{{group}}}}}" for group, _ in grid.groups)
    rules = " ".join(rf"\cmidrule(lr){{{2 + i * width}-{1 + (i + 1) * width}}}" for i in range(len(grid.groups)))
    titles = " & ".join(["Method", *(title for _, names in grid.groups for title in names)])
    body = [" & ".join([name, *cells]) + r" \\" for name, cells in grid.lines]
    baseline = " & ".join(["Baseline", *grid.baseline]) + r" \\"
    return "\n".join(
        [
            f"% {' '.join(grid.caption.split())}",
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
