"""Read records and lay out Markdown tables."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent
RECORDS = DOCS / "records"
MODELS = {"DeltaNet 30M": "delta_net-30m", "Gated 31M": "gated_deltanet-31m"}
PAPER_MODELS = {
    "DeltaNet 370M": "delta_net-370m",
    "DeltaNet 1.3B": "delta_net-1.3b",
    "Gated 370M": "gated_deltanet-370m",
    "Gated 1.3B": "gated_deltanet-1.3b",
}
METHODS = ("random", "l1", "s-wanda", "grad", "drrqr")
GIB = 2**30
Row = Mapping[str, Any]


@functools.cache
def record(name: str) -> Any:
    """Return a record of `docs/records` as plain data."""
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def recall_scores(right: Iterable[Sequence[int]], questions: Sequence[int]) -> list[float]:
    """Return for every seed the share of right answers, the mean over the numbers of pairs as `eval` has it."""
    return [statistics.mean(count / of for count, of in zip(seed, questions, strict=True)) for seed in right]


def recall_errors(scores: Iterable[Sequence[float]]) -> str:
    """Return the largest standard error over the seeds, in points."""
    return f"{max(100 * statistics.stdev(seeds) / len(seeds) ** 0.5 for seeds in scores):.1f}"


def select(rows: Iterable[Row], **fields: object) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in fields.items())]


def only(rows: Iterable[Row], **fields: object) -> Row:
    """Return the one row with these values."""
    (row,) = select(rows, **fields)
    return row


def table(columns: Mapping[str, str], rows: Iterable[Row]) -> str:
    """Return a table with a line for each row. A column is a title and a format string of the fields of a row.

    A cell is empty where a row lacks the field. A column that is empty in all rows is a mistake.
    """
    lines = [[_formatted(template, row) for template in columns.values()] for row in rows]
    for number, title in enumerate(columns):
        if not any(line[number] for line in lines):
            raise ValueError(f"the column {title!r} is empty")
    return markdown(list(columns), lines)


def grid(
    titles: Sequence[str], places: Iterable[tuple[Any, ...]], columns: Iterable[Any], cell: Callable[..., str]
) -> str:
    """Return a table with a line for each place: the place itself, then `cell(*place, column)` for each column."""
    columns = list(columns)
    heads = [", ".join(map(str, column)) if isinstance(column, tuple) else str(column) for column in columns]
    lines = [[*map(str, place), *(cell(*place, column) for column in columns)] for place in places]
    return markdown([*titles, *heads], lines)


def pairs(groups: Mapping[str, Iterable[Any]]) -> list[tuple[str, Any]]:
    """Return every name with each of its values."""
    return [(name, value) for name, values in groups.items() for value in values]


def markdown(titles: list[str], lines: Iterable[list[str]]) -> str:
    """Return a Markdown table of these cells."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *lines))


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def power(number: float) -> str:
    """Return a number as one digit and a power of ten, such as 2e-7; zero as 0."""
    return f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e") if number else "0"


def large(number: float) -> str:
    """Return a number with one decimal, or with none from 500 on."""
    return f"{number:.1f}" if number < 500 else f"{number:,.0f}"


def sweep(*results: str | Row) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return the rows of sweeps of one model by method, score and key dim; a sweep is a record or its name.

    `word_ratio` is the word perplexity over that of the uncut model, where it was measured, `nats_over_uncut` the
    difference per token.
    """
    rows = {}
    for result in (record(name) if isinstance(name, str) else name for name in results):
        uncut = result["uncut"]
        for row in result["rows"]:
            more = {"nats_over_uncut": row["nats_per_token"] - uncut["nats_per_token"]}
            if uncut.get("word_perplexity"):
                more["word_ratio"] = row["word_perplexity"] / uncut["word_perplexity"]
            rows[row["method"], row["score"], row["key_dim"]] = {**row, **more}
    return rows


def timings(name: str, **fields: object) -> dict[int, dict[str, Any]]:
    """Return the rows of a benchmark that were measured, by key dim, with seconds also as `ms` and bytes as `gib`."""
    rows = [row for row in select(record(name)["rows"], **fields) if row.get("seconds")]
    if len({row["key_dim"] for row in rows}) < len(rows):
        raise ValueError(f"{name} has several rows of a key dim with {fields}")
    return {
        row["key_dim"]: {
            **row,
            **{key.replace("seconds", "ms"): 1000 * row[key] for key in row if key.endswith("seconds") and row[key]},
            "gib": row["peak_bytes"] / GIB,
        }
        for row in rows
    }


def _formatted(template: str, row: Row) -> str:
    try:
        return template.format_map(row)
    except (KeyError, TypeError):  # not measured, or null
        return ""
