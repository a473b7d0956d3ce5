"""Benchmark records as tables: Markdown with every number that matters, LaTeX in the paper's layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from slimstate.records.benchmark import (
    BenchRecord,
    CalibrationRow,
    DecodeRow,
    GraphRow,
    KernelRow,
    MixerRecord,
    MixerRow,
    ModelRecord,
    ModelRow,
    TimedRow,
    WidthRow,
)

R = TypeVar("R")
Column = tuple[str, Callable[[R], str]]
TITLES = {"delta_net": "DeltaNet", "gated_deltanet": "Gated DeltaNet"}  # as the paper writes them
NONE = "--"
GIB = 1 / 2**30


def title(model: str) -> str:
    return TITLES.get(model, model)


def number(value: float | None, form: str, factor: float = 1.0) -> str:
    return NONE if value is None else format(value * factor, form)


def _milliseconds(row: TimedRow) -> str:
    return row.error or f"{1000 * row.time:.3f} ±{1000 * row.spread:.2g}"


def _seconds(row: TimedRow) -> str:
    return row.error or f"{row.time:.3f} ±{row.spread:.2g}"


def _speed(row: WidthRow) -> str:
    """10.8M, 416.2k: as the paper writes tokens per second."""
    value = row.tokens_per_second
    if value is None:
        return NONE
    return f"{value / 1e6:.1f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


MODEL: Column[WidthRow] = ("model", lambda row: title(row.model))
KEY_DIM: Column[TimedRow] = ("key dim", lambda row: str(row.key_dim))
MODE: Column[MixerRow | ModelRow | KernelRow] = ("mode", lambda row: row.mode)
TIMES: Column[TimedRow] = ("ms", _milliseconds)
SPEED: Column[WidthRow] = ("tokens/s", _speed)
SPEEDUP: Column[WidthRow] = ("speed-up", lambda row: f"{row.speedup:.2f}x" if row.speedup else NONE)
EAGER: Column[GraphRow] = ("eager ms", lambda row: number(row.eager_seconds, ".3f", 1000))
MEMORY: Column[TimedRow] = ("GiB", lambda row: number(row.peak_bytes, ".2f", GIB))
RATIO: Column[TimedRow] = ("of memory", lambda row: number(row.memory_ratio, ".2f"))

OF_MIXERS: list[Column[MixerRow]] = [MODEL, MODE, KEY_DIM, TIMES, SPEED, SPEEDUP, MEMORY, RATIO]
OF_MODELS: list[Column[ModelRow]] = [MODEL, MODE, KEY_DIM, TIMES, SPEED, SPEEDUP, EAGER, MEMORY, RATIO]
OF_DECODING: list[Column[DecodeRow]] = [
    MODEL,
    KEY_DIM,
    ("sequences", lambda row: f"{row.batch:,}"),
    TIMES,
    SPEED,
    SPEEDUP,
    EAGER,
    ("state MiB each", lambda row: number(row.state_bytes, ".3f", 2**-20)),
    ("state GB/s", lambda row: number(row.state_bandwidth, ",.0f", 1e-9)),
    ("of copying", lambda row: number(row.share_of_copy_bandwidth, ".0%")),
    ("roofline ms", lambda row: number(row.roofline_seconds, ".3f", 1000)),
    MEMORY,
]
OF_KERNELS: list[Column[KernelRow]] = [
    MODEL,
    MODE,
    KEY_DIM,
    TIMES,
    SPEED,
    SPEEDUP,
    ("of copying", lambda row: number(row.share_of_copy_bandwidth, ".0%")),
    ("differs by", lambda row: number(row.difference, ".1e")),
]
OF_CALIBRATION: list[Column[CalibrationRow]] = [
    ("method", lambda row: row.method),
    ("seconds", _seconds),
    ("times the forward", lambda row: number(row.times_forward, ".2f")),
    ("choosing, s", lambda row: number(row.selection_seconds, ".3f")),
    MEMORY,
    RATIO,
]
COLUMNS: Mapping[str, Sequence[Column[Any]]] = {
    "mixer": OF_MIXERS, "model": OF_MODELS, "decode": OF_DECODING, "kernels": OF_KERNELS, "calibrate": OF_CALIBRATION,
}  # fmt: skip
DISPENSABLE = ("eager ms", "state GB/s", "roofline ms", "GiB")


def lines(record: BenchRecord, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Titles and cells; `brief` leaves out what a narrow terminal has no room for."""
    columns = [column for column in COLUMNS[record.bench] if not (brief and column[0] in DISPENSABLE)]
    return [name for name, _ in columns], [[cell(row) for _, cell in columns] for row in record.rows]


def as_markdown(record: BenchRecord) -> str:
    titles, body = lines(record)
    table = [titles, ["---"] * len(titles), *body]
    where = f"{record.device}, {record.dtype}; {record.kernels}"
    return "\n".join([*(f"| {' | '.join(line)} |" for line in table), "", where, "", f"`{record.command}`", ""])


def as_latex(record: BenchRecord) -> str:
    """A tabular that needs booktabs: the paper's two tables of throughput, ours in the same manner for the rest."""
    if isinstance(record, MixerRecord):
        return _mixers(record.rows)
    return _models(record.rows) if isinstance(record, ModelRecord) else _plain(record)


def _tabular(columns: str, head: Sequence[str], body: Sequence[str]) -> str:
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            *head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _escaped(text: str) -> str:
    return text.replace("%", r"\%").replace("_", r"\_")


def _mixers(rows: Sequence[MixerRow]) -> str:
    """A block for each model and mode: key dim, tokens per second, speed-up, memory, ratio."""
    body: list[str] = []
    for place, (model, mode) in enumerate(dict.fromkeys((row.model, row.mode) for row in rows)):
        if place:
            body.append(r"\midrule")
        for index, row in enumerate(row for row in rows if (row.model, row.mode) == (model, mode)):
            cells = [
                f"{_escaped(title(model))}, {mode}" if index == 0 else "",
                str(row.key_dim),
                _speed(row),
                rf"{number(row.speedup, '.2f')}$\times$",
                f"{number(row.peak_bytes, '.2f', GIB)}GiB" if row.peak_bytes else NONE,
                number(row.memory_ratio, ".2f"),
            ]
            body.append(_line(cells))
    bold = (rf"\textbf{{{name}}}" for name in ("TPS", "Speedup", "Memory", "Ratio"))
    return _tabular("llcccc", [_line([r"\textbf{Model}", r"$\boldsymbol{d_k}$", *bold])], body)


def _models(rows: Sequence[ModelRow]) -> str:
    """A line for each compression and a pair of columns for each model and mode: thousands of tokens/s, speed-up."""
    groups = list(dict.fromkeys((row.model, row.mode) for row in rows))
    found = {(row.model, row.mode, row.compression): row for row in rows}
    names = [rf"\multicolumn{{2}}{{c}}{{\textbf{{{_escaped(title(model))}, {mode}}}}}" for model, mode in groups]
    head = [_line(["", *names]), _line(["", *["Throughput & Speedup"] * len(groups)])]
    body = []
    for cut in sorted({row.compression for row in rows}):
        cells = [rf"{100 * cut:g}\%"]
        for group in groups:
            row = found.get((*group, cut))
            speed, speedup = (None, None) if row is None else (row.tokens_per_second, row.speedup)
            cells += [number(speed, ".1f", 1e-3), rf"${number(speedup, '.2f')}\times$"]
        body.append(_line(cells))
    return _tabular("c" + "|cc" * len(groups), head, body)


def _plain(record: BenchRecord) -> str:
    titles, body = lines(record)
    head = _line([rf"\textbf{{{_escaped(name)}}}" for name in titles])
    return _tabular("l" * len(titles), [head], [_line([_escaped(cell) for cell in line]) for line in body])
