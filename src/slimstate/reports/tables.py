"""Write a sweep as tables: CSV with every number, Markdown and LaTeX in the layout of the paper.

The main table has a group of columns for each key dim and state type, smallest state first, and a line for each method
and score. The ablation has a column for each score. The best number of a column is bold, the second best underlined.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from slimstate.core.standard_errors import residual_error
from slimstate.records.evaluation import UNCUT, UNINFORMED, Row, SweepRecord, Uncut
from slimstate.records.numbers import UNKNOWN, fixed, magnitude, perplexity
from slimstate.system.atomic import write_text
from slimstate.system.value import Value

NAMES = {
    "random": "Rand", "l1": "L1", "s-wanda": "S-Wanda", "grad": "Grad", "drrqr": "DRRQR", "pca": "PCA (prop.)",
    "pca-adversarial": "PCA (adv.)", "pca-released": "PCA (released)",
    "pca-released-adversarial": "PCA (released, adv.)", "random-rotation": "Rand. rotation", UNCUT: "Uncut",
}  # fmt: skip
WIKITEXT = "wikitext word_perplexity"  # of the task of lm-eval
ARROWS = {True: "↑", False: "↓", None: ""}  # by whether more is better
SCORES = {"kq": "K, Q", "k": "K", "q": "Q"}
FIELDS = (
    "method", "score", "compression", "key_dim", "value_dim", "state_dtype", "state_bytes", "perplexity",
    "word_perplexity", "bits_per_byte", "nats_per_token", "nats_over_uncut", "nats_error", "recall_over_uncut",
    "recall_error", "rank_utilisation", "kappa", "kappa_worst", "tokens", "words", "bytes",
)  # fmt: skip
LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "_%&#${}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
        **{"↑": r"$\uparrow$", "↓": r"$\downarrow$", "κ": r"$\kappa$", "–": "--", "−": "$-$"},
    }
)


def word_perplexity(result: Row | Uncut) -> float | None:
    """Return the word perplexity of WikiText, which may be the text or a task of the sweep."""
    return task_values(result).get(WIKITEXT) if result.word_perplexity is None else result.word_perplexity


def task_values(result: Row | Uncut) -> dict[str, float | None]:
    """Return recall, the scores of the user and every metric of every lm-eval task by name."""
    return {measure.name: measure.value for measure in result.measures()}


class Metric(Value):
    """A column of a table: its title, the value of a result, which may be unknown, and how to write it."""

    title: str
    value: Callable[[Row | Uncut], float | None]
    text: Callable[[float], str] = perplexity
    more_is_better: bool | None = False
    long_title: str = ""

    def format(self, value: float | None) -> str:
        return UNKNOWN if value is None else self.text(value)


PER_TOKEN = Metric(title="token ppl ↓", value=attrgetter("perplexity"), long_title="perplexity per token")
PER_WORD = Metric(title="word ppl ↓", value=word_perplexity, long_title="perplexity per word")
UTILISATION = Metric(
    title="u ↑", value=attrgetter("rank_utilisation"), text=partial(fixed, digits=3), more_is_better=True
)
KAPPA = Metric(title="κ ↓", value=lambda result: getattr(result, "kappa", None), text=magnitude)


def perplexity_metric(sweep: SweepRecord) -> Metric:
    """Return perplexity per word where all rows have it; per token where the text is not WikiText."""
    results: list[Row | Uncut] = [sweep.uncut, *(row for row in sweep.rows if row.perplexity is not None)]
    return PER_WORD if None not in map(word_perplexity, results) else PER_TOKEN


def task_metrics(sweep: SweepRecord) -> list[Metric]:
    """Return recall, the scores of the user and the main metric of each lm-eval task in a sweep."""
    return [
        Metric(
            title=f"{measure.name} {ARROWS[measure.more_is_better]}".rstrip(),
            value=partial(lambda name, result: task_values(result).get(name), measure.name),
            text=partial(perplexity, digits=2 if measure.more_is_better is False else 3),
            more_is_better=measure.more_is_better,
        )
        for measure in sweep.uncut.measures(main=True)
    ]


class GridCell(NamedTuple):
    """The text of a cell, and its place in its column: 0 is the best, 1 the second best."""

    text: str
    rank: int | None = None


class Grid(Value):
    """Groups of columns, a line of cells for each method, and the line of the uncut model."""

    caption: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    lines: tuple[tuple[str, tuple[GridCell, ...]], ...]
    baseline: tuple[str, ...]


def grid_caption(sweep: SweepRecord) -> str:
    """Return the unit of the perplexities, their standard error and the text they were measured on."""
    is_per_token, uncut = perplexity_metric(sweep) is PER_TOKEN, sweep.uncut
    pages = uncut.page_residuals
    errors = [row.nats_error if is_per_token else residual_error(row.page_residuals, pages) for row in sweep.rows]
    largest = max((error for error in errors if error is not None), default=None)
    error = "" if largest is None else f" Standard error of a ratio to the baseline: at most {100 * largest:.2g} %."
    if is_per_token:
        return f"Perplexity is per token, not per word as in the WikiText columns of the paper.{error}"
    counts, text = uncut.counts, None if sweep.settings.text is None else sweep.settings.text.data
    source = f": {counts}{f' of {text}' if text else ''}" if counts else ""
    return f"Perplexity is per word, by lm-eval's wikitext, as in the paper{source}.{error}"


def write_tables(sweep: SweepRecord, folder: Path) -> None:
    """Write sweep.csv, sweep.md and sweep.tex; with several scores also ablation.md and ablation.tex."""
    write_text(folder / "sweep.csv", as_csv(sweep.rows))
    for name, grid in (("sweep", main_grid(sweep)), ("ablation", ablation_grid(sweep))):
        if grid is not None:
            write_text(folder / f"{name}.md", as_markdown(grid))
            write_text(folder / f"{name}.tex", as_latex(grid))


def as_csv(rows: Sequence[Row]) -> str:
    """Return all numbers of the rows, a column for each field and each metric of a task."""
    from pandas import DataFrame

    lines = [{**{name: getattr(row, name) for name in FIELDS}, **task_values(row)} for row in rows]
    return str(DataFrame(lines, dtype=object).to_csv(index=False, lineterminator="\n"))


def main_grid(sweep: SweepRecord) -> Grid:
    """Return methods and scores by key dims."""

    def label(row: Row) -> str:
        name = NAMES.get(row.method, row.method)
        return name if row.score == "kq" else f"{name} by {SCORES.get(row.score, row.score)}"

    tasks = task_metrics(sweep)
    if sweep.uncut.word_perplexity is None:  # the first column may show it
        tasks = [metric for metric in tasks if not metric.title.startswith(f"{WIKITEXT} ")]
    metrics = (perplexity_metric(sweep), *tasks, UTILISATION, KAPPA)
    return _grid(sweep, sweep.rows, [(metric.title, metric, sweep.rows) for metric in metrics], label)


def ablation_grid(sweep: SweepRecord) -> Grid | None:
    """Return perplexity by method and score, a group for each key dim; None where there is one score at most."""
    metric = perplexity_metric(sweep)
    rows = [row for row in sweep.rows if row.method not in (UNCUT, *UNINFORMED)]
    if len({row.score for row in rows}) < 2:
        return None
    by_score = {score: [row for row in rows if row.score == score] for score in SCORES}
    unit = metric.title.removesuffix(" ↓")
    columns = [(f"{SCORES[score]}, {unit}", metric, of) for score, of in by_score.items() if of]
    return _grid(sweep, rows, columns, lambda row: NAMES.get(row.method, row.method))


def _grid(
    sweep: SweepRecord, rows: Sequence[Row], columns: Sequence[tuple[str, Metric, Sequence[Row]]],
    label: Callable[[Row], str],
) -> Grid:  # fmt: skip
    """Return a grid with these columns (title, metric, rows to take it from) for each size of state."""
    compressions = {_size(row): row.compression for row in rows}
    sizes, labels = sorted(compressions), list(dict.fromkeys(map(label, rows)))
    cells = [
        _column(metric, {label(row): row for row in scored if _size(row) == size}, labels)
        for size in sizes
        for _, metric, scored in columns
    ]
    titles = tuple(title for title, _, _ in columns)
    return Grid(
        caption=grid_caption(sweep),
        groups=tuple((_group_title(*size[1:], compressions[size]), titles) for size in sizes),
        lines=tuple((name, tuple(column[place] for column in cells)) for place, name in enumerate(labels)),
        baseline=tuple(metric.format(metric.value(sweep.uncut)) for _, metric, _ in columns) * len(sizes),
    )


def _size(row: Row) -> tuple[float, str, str]:
    return row.state_bytes, row.dims, row.state_dtype


def _group_title(dims: str, state_dtype: str, compression: float) -> str:
    stored = "" if state_dtype == "float32" else f", state in {state_dtype}"
    return f"{100 * compression:.3g}% compression (key dim {dims}{stored})"


def _column(metric: Metric, rows: Mapping[str, Row], labels: Sequence[str]) -> list[GridCell]:
    """Return the cells of one column with their ranks; a single value has none."""
    values = [metric.value(rows[label]) if label in rows else None for label in labels]
    order = sorted({value for value in values if value is not None}, reverse=bool(metric.more_is_better))
    is_ranked = len(order) > 1 and metric.more_is_better is not None
    ranks = {value: rank for rank, value in enumerate(order[:2])} if is_ranked else {}
    return [GridCell(metric.format(value), None if value is None else ranks.get(value)) for value in values]


def _mark(cell: GridCell, marks: tuple[str, str]) -> str:
    return cell.text if cell.rank is None else marks[cell.rank] % cell.text


def as_markdown(grid: Grid) -> str:
    titles = [f"{group}: {title}" for group, names in grid.groups for title in names]
    lines = [[name, *(_mark(cell, ("**%s**", "<u>%s</u>")) for cell in cells)] for name, cells in grid.lines]
    return f"{markdown_table(['Method', *titles], [*lines, ['Baseline', *grid.baseline]])}\n\n{grid.caption}\n"


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows))


def as_latex(grid: Grid) -> str:
    """Return a grid as a LaTeX tabular; it needs the package booktabs."""
    width = len(grid.groups[0][1])
    groups = [rf"\multicolumn{{{width}}}{{c}}{{\textbf{{{latex_text(group)}}}}}" for group, _ in grid.groups]
    rules = [rf"\cmidrule(lr){{{2 + place * width}-{1 + (place + 1) * width}}}" for place in range(len(grid.groups))]
    titles = [latex_text(title) for _, names in grid.groups for title in names]
    marks = (r"\textbf{%s}", r"\underline{%s}")
    lines = [
        latex_line([latex_text(name), *(_mark(cell._replace(text=latex_text(cell.text)), marks) for cell in cells)])
        for name, cells in grid.lines
    ]
    tabular = latex_tabular(
        f"l {' '.join(['c' * width] * len(grid.groups))}",
        [latex_line(["", *groups]), " ".join(rules), latex_line(["Method", *titles])],
        [*lines, r"\midrule", latex_line(["Baseline", *map(latex_text, grid.baseline)])],
    )
    return f"% {' '.join(grid.caption.split())}\n{tabular}"


def latex_text(text: str) -> str:
    return text.translate(LATEX)


def latex_line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def latex_tabular(columns: str, head: Sequence[str], body: Sequence[str]) -> str:
    begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
    return "\n".join([begin, r"\toprule", *head, r"\midrule", *body, r"\bottomrule", end, ""])
