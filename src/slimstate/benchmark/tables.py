"""Benchmark records as tables: Markdown with every number that matters, LaTeX in the paper's layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slimstate.benchmark.subjects import in_words

Record = Mapping[str, Any]
Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def number(row: Row, field: str, form: str, factor: float = 1.0) -> str:
    value = row.get(field)
    return "--" if value is None else format(value * factor, form)


def _milliseconds(row: Row) -> str:
    if row["error"]:
        return str(row["error"])
    return f"{1000 * row['seconds']:.3f} ±{1000 * _spread(row):.2g}"


def _seconds(row: Row) -> str:
    return str(row["error"]) if row["error"] else f"{row['seconds']:.3f} ±{_spread(row):.2g}"


def _spread(row: Row) -> float:
    """Half of what lies between the quartiles."""
    low, high = row["quartiles"]
    return (high - low) / 2


def _count(value: float | None) -> str:
    """10.8M, 416.2k: as the paper writes tokens per second."""
    if value is None:
        return "--"
    return f"{value / 1e6:.1f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


def _speed(row: Row) -> str:
    return _count(row.get("tokens_per_second"))


GIB = 1 / 2**30
TIMES: Column = ("ms", _milliseconds)
SPEEDUP: Column = ("speed-up", lambda row: f"{number(row, 'speedup', '.2f')}x" if row.get("speedup") else "--")
EAGER: Column = ("eager ms", lambda row: number(row, "eager_seconds", ".3f", 1000))
MEMORY: Column = ("GiB", lambda row: number(row, "peak_bytes", ".2f", GIB))
RATIO: Column = ("of memory", lambda row: number(row, "memory_ratio", ".2f"))
NAME: Column = ("model", lambda row: in_words(row["model"]))
KEY_DIM: Column = ("key dim", lambda row: str(row["key_dim"]))
MODE: Column = ("mode", lambda row: str(row["mode"]))
COLUMNS: dict[str, list[Column]] = {
    "mixer": [NAME, MODE, KEY_DIM, TIMES, ("tokens/s", _speed), SPEEDUP, MEMORY, RATIO],
    "model": [NAME, MODE, KEY_DIM, TIMES, ("tokens/s", _speed), SPEEDUP, EAGER, MEMORY, RATIO],
    "decode": [
        NAME,
        KEY_DIM,
        ("sequences", lambda row: f"{row['batch']:,}"),
        TIMES,
        ("tokens/s", _speed),
        SPEEDUP,
        EAGER,
        ("state MiB each", lambda row: number(row, "state_bytes", ".3f", 2**-20)),
        ("state GB/s", lambda row: number(row, "state_bandwidth", ",.0f", 1e-9)),
        ("of copying", lambda row: number(row, "share_of_copy_bandwidth", ".0%")),
        ("roofline ms", lambda row: number(row, "roofline_seconds", ".3f", 1000)),
        MEMORY,
    ],
    "calibrate": [
        ("method", lambda row: str(row["method"])),
        ("seconds", _seconds),
        ("times the forward", lambda row: number(row, "times_forward", ".2f")),
        ("choosing, s", lambda row: number(row, "selection_seconds", ".3f")),
        MEMORY,
        RATIO,
    ],
}


DISPENSABLE = ("eager ms", "state GB/s", "roofline ms", "GiB")


def lines(record: Record, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Titles and cells; `brief` leaves out what a narrow terminal has no room for."""
    columns = [column for column in COLUMNS[record["bench"]] if not (brief and column[0] in DISPENSABLE)]
    return [title for title, _ in columns], [[cell(row) for _, cell in columns] for row in record["rows"]]


def as_markdown(record: Record) -> str:
    titles, body = lines(record)
    table = [titles, ["---"] * len(titles), *body]
    where = f"{record['device']}, {record['dtype']}; {record['kernels']}"
    return "\n".join([*(f"| {' | '.join(line)} |" for line in table), "", where, "", f"`{record['command']}`", ""])


def as_latex(record: Record) -> str:
    """A tabular that needs booktabs: the paper's two tables of throughput, ours in the same manner for the rest."""
    return {"mixer": _mixers, "model": _models}.get(record["bench"], _plain)(record)


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


def _mixers(record: Record) -> str:
    """A block for each model and mode: key dim, tokens per second, speed-up, memory, ratio."""
    body: list[str] = []
    groups = dict.fromkeys((row["model"], row["mode"]) for row in record["rows"])
    for place, (model, mode) in enumerate(groups):
        if place:
            body.append(r"\midrule")
        for index, row in enumerate(row for row in record["rows"] if (row["model"], row["mode"]) == (model, mode)):
            cells = [
                f"{in_words(model)}, {mode}" if index == 0 else "",
                str(row["key_dim"]),
                _speed(row),
                rf"{number(row, 'speedup', '.2f')}$\times$",
                _gib(row),
                number(row, "memory_ratio", ".2f"),
            ]
            body.append(" & ".join(cells) + r" \\")
    head = [
        r"\textbf{Model} & $\boldsymbol{d_k}$ & \textbf{TPS} & \textbf{Speedup} & \textbf{Memory} & \textbf{Ratio} \\"
    ]
    return _tabular("llcccc", head, body)


def _gib(row: Row) -> str:
    return f"{number(row, 'peak_bytes', '.2f', GIB)}GiB" if row.get("peak_bytes") else "--"


def _models(record: Record) -> str:
    """A line for each compression and a pair of columns for each model and mode: thousands of tokens/s, speed-up."""
    rows = [{**row, "cut": round(1 - row["key_dim"] / row["width"], 4)} for row in record["rows"]]
    groups = list(dict.fromkeys((row["model"], row["mode"]) for row in rows))
    found = {(row["model"], row["mode"], row["cut"]): row for row in rows}
    names = [rf"\multicolumn{{2}}{{c}}{{\textbf{{{in_words(model)}, {mode}}}}}" for model, mode in groups]
    head = [" & ".join(["", *names]) + r" \\", " & ".join(["", *["Throughput & Speedup"] * len(groups)]) + r" \\"]
    body = []
    for cut in sorted({row["cut"] for row in rows}):
        cells = [rf"{100 * cut:g}\%"]
        for group in groups:
            row = found.get((*group, cut), {})
            speed = number(row, "tokens_per_second", ".1f", 1e-3)
            cells += [speed, rf"${number(row, 'speedup', '.2f')}\times$"]
        body.append(" & ".join(cells) + r" \\")
    return _tabular("c" + "|cc" * len(groups), head, body)


def _plain(record: Record) -> str:
    titles, body = lines(record)
    rows = [" & ".join(cell.replace("%", r"\%").replace("_", r"\_") for cell in line) + r" \\" for line in body]
    return _tabular("l" * len(titles), [" & ".join(rf"\textbf{{{title}}}" for title in titles) + r" \\"], rows)
