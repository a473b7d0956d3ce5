"""Write benchmark records with a figure and tables: Markdown with every number, LaTeX in the paper's layout."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from slimstate.benchmark.options import title
from slimstate.records.benchmark import BenchRecord, MixerRecord, MixerRow, ModelRecord, ModelRow, TimedRow, WidthRow
from slimstate.records.folder import check_drawings, check_record
from slimstate.reports.tables import latex_line, latex_tabular, latex_text, markdown_table
from slimstate.system.atomic import check_place, staged_files, write_text

R = TypeVar("R", bound=WidthRow)
NONE = "--"
GIB = 1 / 2**30


def number(value: float | None, form: str, factor: float = 1.0) -> str:
    return NONE if value is None else format(value * factor, form)


def _duration(row: TimedRow, factor: float) -> str:
    if row.error:
        return row.error
    return f"{factor * row.time:.3f}" + (f" ±{factor * row.spread:.2g}" if row.spread else "")  # one round has none


def _speed(value: float | None) -> str:
    """Format tokens per second as the paper does: 10.8M, 416.2k."""
    if value is None:
        return NONE
    return f"{value / 1e6:.1f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


CELLS: Mapping[str, Callable[[Any], str]] = {
    "model": lambda row: title(row.model),
    "method": lambda row: row.method,
    "mode": lambda row: row.mode,
    "key dim": lambda row: str(row.key_dim),
    "value dim": lambda row: NONE if row.value_dim is None else str(row.value_dim),
    "sequences": lambda row: f"{row.batch:,}",
    "ms": lambda row: _duration(row, 1000),
    "seconds": lambda row: _duration(row, 1),
    "times the forward": lambda row: number(row.times_forward, ".2f"),
    "selection, s": lambda row: number(row.selection_seconds, ".3f"),
    "tokens/s": lambda row: _speed(row.tokens_per_second),
    "speed-up": lambda row: f"{row.speedup:.2f}x" if row.speedup else NONE,
    "eager ms": lambda row: number(row.eager_seconds, ".3f", 1000),
    "state MiB each": lambda row: number(row.state_bytes, ".3f", 2**-20),
    "state GB/s": lambda row: number(row.state_bandwidth, ",.0f", 1e-9),
    "of copying": lambda row: number(row.share_of_copy_bandwidth, ".0%"),
    "roofline ms": lambda row: number(row.roofline_seconds, ".3f", 1000),
    "differs by": lambda row: number(row.difference, ".1e"),
    "GiB": lambda row: number(row.peak_bytes, ".2f", GIB),
    "of memory": lambda row: number(row.memory_ratio, ".2f"),
}
TIMED = ("key dim", "value dim", "ms", "tokens/s", "speed-up")
COLUMNS: Mapping[str, Sequence[str]] = {
    "mixer": ("model", "mode", *TIMED, "GiB", "of memory"),
    "model": ("model", "mode", *TIMED, "eager ms", "GiB", "of memory"),
    "decode": (
        "model", "key dim", "value dim", "sequences", "ms", "tokens/s", "speed-up", "eager ms", "state MiB each",
        "state GB/s", "of copying", "roofline ms", "GiB",
    ),
    "kernels": ("model", "mode", *TIMED, "of copying", "differs by"),
    "calibrate": ("method", "seconds", "times the forward", "selection, s", "GiB", "of memory"),
}  # fmt: skip


def table(record: BenchRecord) -> tuple[list[str], list[list[str]]]:
    has_values = any(getattr(row, "value_dim", None) for row in record.rows)
    titles = [name for name in COLUMNS[record.bench] if has_values or name != "value dim"]
    return titles, [[CELLS[name](row) for name in titles] for row in record.rows]


def as_markdown(record: BenchRecord) -> str:
    titles, rows = table(record)
    origin = f"{record.device}, {record.dtype}; {record.kernels}"
    return f"{markdown_table(titles, rows)}\n\n{origin}\n\n`{record.command}`\n"


def as_latex(record: BenchRecord) -> str:
    """Return a tabular that needs booktabs: the paper's two tables of throughput, and plain ones for the rest."""
    if isinstance(record, MixerRecord):
        return _mixers(record.rows)
    if isinstance(record, ModelRecord):
        return _models(record.rows)
    titles, rows = table(record)
    head = latex_line([rf"\textbf{{{latex_text(name)}}}" for name in titles])
    return latex_tabular("l" * len(titles), [head], [latex_line(map(latex_text, cells)) for cells in rows])


def _mixers(rows: Sequence[MixerRow]) -> str:
    """Return a block for each model and mode: dims, tokens per second, speed-up, memory, ratio."""
    label = _dims_label(rows, lambda row: str(row.key_dim))
    blocks: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        block = blocks.setdefault((row.model, row.mode), [])
        cells = [
            "" if block else f"{latex_text(title(row.model))}, {row.mode}",
            label(row),
            _speed(row.tokens_per_second),
            rf"{number(row.speedup, '.2f')}$\times$",
            f"{number(row.peak_bytes, '.2f', GIB)}GiB" if row.peak_bytes else NONE,
            number(row.memory_ratio, ".2f"),
        ]
        block.append(latex_line(cells))
    bold = (rf"\textbf{{{name}}}" for name in ("TPS", "Speedup", "Memory", "Ratio"))
    head = latex_line([r"\textbf{Model}", r"$\boldsymbol{d_k}$", *bold])
    body = "\n\\midrule\n".join("\n".join(block) for block in blocks.values())
    return latex_tabular("llcccc", [head], [body])


def _models(rows: Sequence[ModelRow]) -> str:
    """Return a line for each compression, or both dims where value dims differ: thousands of tokens/s, speed-up."""
    label = _dims_label(rows, lambda row: rf"{100 * row.compression:g}\%")
    by_cell = {((row.model, row.mode), label(row)): row for row in rows}
    groups = list(dict.fromkeys(group for group, _ in by_cell))
    names = [rf"\multicolumn{{2}}{{c}}{{\textbf{{{latex_text(title(model))}, {mode}}}}}" for model, mode in groups]
    head = [latex_line(["", *names]), latex_line(["", *["Throughput & Speedup"] * len(groups)])]
    body = []
    for line in dict.fromkeys(map(label, sorted(rows, key=lambda row: (row.compression, -(row.value_dim or 0))))):
        cells = [line]
        for group in groups:
            row = by_cell.get((group, line))
            speed, speedup = (None, None) if row is None else (row.tokens_per_second, row.speedup)
            cells += [number(speed, ".1f", 1e-3), rf"${number(speedup, '.2f')}\times$"]
        body.append(latex_line(cells))
    return latex_tabular("c" + "|cc" * len(groups), head, body)


def _dims_label(rows: Sequence[R], by_key_dim: Callable[[R], str]) -> Callable[[R], str]:
    """Return how rows are labelled: by their key dim, or by both dims where a model has several value dims."""
    if len({(row.model, row.value_dim) for row in rows}) == len({row.model for row in rows}):
        return by_key_dim
    return lambda row: rf"{row.key_dim} $\times$ {row.value_dim}"


def check_output(folder: Path, name: str) -> None:
    """Raise an error, before any work, if the files of a benchmark cannot be written."""
    import slimstate.reports.plots  # noqa: F401  needs matplotlib

    check_place(folder, folder=True)
    check_record(folder / f"bench-{name}.json")
    check_drawings(folder, [f"bench-{name}.*"], beside=f"bench-{name}.json")


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
