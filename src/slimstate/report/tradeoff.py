"""The trade-off: what a smaller state costs, from sweeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slimstate.records.folder import Found
from slimstate.records.sweep import Row, SweepRecord, Uncut
from slimstate.report import plots, tables
from slimstate.report.markup import Html, element, joined
from slimstate.report.numbers import UNKNOWN, fixed, magnitude, mebibytes, percent, perplexity, signed
from slimstate.report.pieces import Cell, Section, code, drawing, figure, note, prefix, sortable

COLUMNS = (
    "method", "score", "compression", "key dim", "state, MiB", "perplexity per token", "per word",
    "bits per byte", "nats over uncut", "utilisation", "κ, median", "κ, worst",
)  # fmt: skip


def tradeoff_section(sweeps: Sequence[Found[SweepRecord]]) -> Section | None:
    if not sweeps:
        return None
    several = len(sweeps) > 1
    bodies = [
        joined([sweep_heading(found) if several else None, sweep_body(found.record, prefix("pareto", number))])
        for number, found in enumerate(sweeps)
    ]
    return Section(anchor="trade-off", title="The trade-off", body=joined(bodies))


def sweep_heading(found: Found[SweepRecord]) -> Html:
    return element("h3", found.record.model, " ", element("small", found.path))


def sweep_body(sweep: SweepRecord, name: str) -> Html:
    unit = tables.perplexity_metric(sweep).words.capitalize()
    caption = (
        f"{unit} (lower is better, on a logarithmic scale) against the bytes of the state: the star is the uncut "
        "model, each line a method, and the flatter a line runs to the left, the less a smaller state costs."
    )
    if sweep.state_dtypes != ("float32",):
        caption += " Cuts and types of the state are on one scale; rows that nothing else beats are on the front."
    picture = drawing(plots.pareto(sweep), name, f"{unit} against state size", point_tips(sweep))
    return joined(
        [
            recommendation(sweep),
            figure(picture, caption),
            row_table(sweep, name),
            paper_table("In the layout of the paper.", tables.main_grid(sweep, latex=False)),
            paper_table("Perplexity by what channels are judged by.", tables.ablation_grid(sweep, latex=False))
            if tables.several_scores(sweep)
            else None,
            note(
                "u is the mean rank utilisation of the states at the end of a window; κ is the median, over heads, of "
                "the condition number of the keys that stay. The best number of a column is bold, the second best "
                "underlined."
            ),
        ]
    )


def recommendation(sweep: SweepRecord) -> Html:
    chosen = sweep.recommended
    if chosen is None or chosen.row is None or not chosen.reason:
        return note("This sweep is not finished, so nothing is recommended yet; the same command goes on with it.")
    label = "Recommended" if chosen.within else "Nothing is recommended"
    return element("p", element("strong", label, class_="badge"), " ", chosen.reason, ".", class_="recommended")


def saved(sweep: SweepRecord, row: Row) -> float:
    return 1 - row.state_bytes / sweep.uncut.state_bytes


def point_tips(sweep: SweepRecord) -> dict[str, str]:
    uncut = sweep.uncut
    tips = {
        f"point-{number}": "\n".join(
            [
                f"{row.method} ({row.score}), key dim {row.key_dim}{kept_in(row)}",
                perplexities(row),
                f"{signed(row.nats_over_uncut)} nats per token over uncut",
                f"state {mebibytes(row.state_bytes)} MiB, {percent(saved(sweep, row))} less",
            ]
        )
        for number, row in enumerate(sweep.rows)
    }
    size = f"state {mebibytes(uncut.state_bytes)} MiB"
    tips["point-uncut"] = f"uncut, key dim {uncut.key_dim}\n{perplexities(uncut)}\n{size}"
    return tips


def kept_in(row: Row) -> str:
    return "" if row.state_dtype == "float32" else f", state in {row.state_dtype}"


def perplexities(measured: Row | Uncut) -> str:
    """In the units that are known."""
    per_word = "" if measured.word_perplexity is None else f", {perplexity(measured.word_perplexity)} per word"
    per_byte = "" if measured.bits_per_byte is None else f", {fixed(measured.bits_per_byte, 3)} bits per byte"
    return f"perplexity {perplexity(measured.perplexity)} per token{per_word}{per_byte}"


def row_table(sweep: SweepRecord, name: str) -> Html:
    chosen = sweep.recommended
    label = "recommended" if chosen is not None and chosen.within else "mildest"
    tasks = list(tables.task_values(sweep.uncut))
    several = sweep.state_dtypes != ("float32",)
    front = sweep.front if several else ()

    def lines() -> Iterator[tuple[Sequence[Cell], Mapping[str, object]]]:
        for number, row in enumerate(sweep.rows):
            best = chosen is not None and number == chosen.row
            cells = row_cells(row, [label] * best + ["front"] * (number in front))
            yield (
                [*cells, *[Cell(shown=row.state_dtype)] * several, *task_cells(row, tasks)],
                {"data_point": f"{name}-point-{number}", "class_": "best" if best else None},
            )

    text = None if sweep.settings.text is None else sweep.settings.text.data
    columns = (*COLUMNS, *["state kept in"] * several, *(name.replace("_", " ") for name in tasks))
    told = "; on the front is what nothing beats in both bytes and perplexity" if several else ""
    table = sortable(f"Every cut that was tried{told}. Press a header to sort by it.", columns, lines())
    uncut = note(f"Uncut: {perplexities(sweep.uncut)}", *task_words(sweep.uncut), ".")
    counts = f": {sweep.uncut.counts}" if sweep.uncut.counts else ""
    return joined([table, uncut, note("Perplexity on ", code(text), f"{counts}.") if text else None])


def task_cells(row: Row, names: Sequence[str]) -> list[Cell]:
    found = tables.task_values(row)
    return [Cell(shown=perplexity(found.get(name), 3), value=found.get(name), numeric=True) for name in names]


def task_words(uncut: Uncut) -> Iterator[str]:
    for name, value in tables.task_values(uncut).items():
        yield f", {name.replace('_', ' ')} {perplexity(value, 3)}"


def row_cells(row: Row, labels: Sequence[str]) -> list[Cell]:
    def number(value: float | None, shown: str) -> Cell:
        return Cell(shown=UNKNOWN if value is None else shown, value=value, numeric=True)

    badges = [element("span", label, class_="badge") for label in labels]
    return [
        Cell(shown=joined([row.method, *badges], " "), value=row.method),
        Cell(shown=row.score),
        number(row.compression, percent(row.compression)),
        number(row.key_dim, str(row.key_dim)),
        number(row.state_bytes, mebibytes(row.state_bytes)),
        number(row.perplexity, perplexity(row.perplexity)),
        number(row.word_perplexity, perplexity(row.word_perplexity)),
        number(row.bits_per_byte, fixed(row.bits_per_byte, 4)),
        number(row.nats_over_uncut, signed(row.nats_over_uncut)),
        number(row.rank_utilisation, fixed(row.rank_utilisation, 3)),
        number(row.kappa, magnitude(row.kappa)),
        number(row.kappa_worst, magnitude(row.kappa_worst)),
    ]


def paper_table(caption: str, grid: tables.Grid) -> Html:
    """Groups of columns over columns, a line for each method, the uncut model last."""
    groups = (element("th", name, scope="colgroup", colspan=len(titles)) for name, titles in grid.groups)
    titles = [element("th", title, scope="col") for _, names in grid.groups for title in names]
    lines = [*grid.lines, ("uncut", grid.baseline)]
    body = (
        element("tr", element("th", name, scope="row"), *(element("td", marked(cell)) for cell in cells))
        for name, cells in lines
    )
    corner = element("th", "method", scope="col", rowspan=2)
    whole = element(
        "table",
        element("caption", element("span", f"{caption} {grid.caption}")),
        element("thead", element("tr", corner, *groups), element("tr", *titles)),
        element("tbody", *body),
        class_="paper",
    )
    return element("div", whole, class_="scroll")


def marked(cell: str) -> Html | str:
    """Bold and underlined as in Markdown, in HTML."""
    for before, after, name in (("**", "**", "strong"), ("<u>", "</u>", "u")):
        if cell.startswith(before) and cell.endswith(after) and len(cell) > len(before + after):
            return element(name, cell.removeprefix(before).removesuffix(after))
    return cell
