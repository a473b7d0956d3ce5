"""The pages as tests read them: their tables by cells, their prose as one line, and the records they name."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from places import ROOT

RECORDS = ROOT / "docs" / "records"
DOCS = ROOT / "docs"
PAGES = {
    "README.md": (ROOT / "README.md").read_text(encoding="utf-8"),
    **{str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")},
}
Ratios = dict[tuple[str, str, int], float]
EXPERIMENTS = "EXPERIMENTS.md"
METHODS = ["random", "l1", "s-wanda", "grad", "drrqr"]
SIZES = {"DeltaNet 30M": "delta_net-30m", "Gated 31M": "gated_deltanet-31m"}


@functools.cache
def record(name: str) -> Any:
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def table_after(page: str, words: str) -> list[list[str]]:
    """The first table behind these words, by rows of cells: its head, then what stands below the line of dashes."""
    text = PAGES[page]
    lines = text[text.index(words) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line[1:-1].split("|")])
    return [rows[0], *rows[2:]]


def columns(head: list[str]) -> list[tuple[str, str]]:
    """What each column is of: `DeltaNet 30M: 89 | 76` are two columns of one group."""
    found, group = [], ""
    for cell in head[1:]:
        *named, title = cell.rsplit(": ", 1)
        group = named[0] if named else group
        found.append((group, title))
    return found


def check_cells(page: str, words: str, rows: list[str], cell: Callable[[str, str, str], str]) -> None:
    """A table of these rows, each cell of which is what `cell` makes of its row, its group of columns and its title."""
    head, *body = table_after(page, words)
    assert [row[0] for row in body] == rows
    for name, *cells in body:
        expected = [cell(name, group, title) for group, title in columns(head)]
        assert cells == expected, name


def check_rows(page: str, words: str, head: str, expected: list[list[str]]) -> None:
    """A table with this head, whose rows below it are these, cell by cell."""
    first, *body = table_after(page, words)
    assert " | ".join(first) == head
    assert body == expected


def check_says(page: str, *sentences: str) -> None:
    flat = " ".join(PAGES[page].split())
    for sentence in sentences:
        assert sentence in flat, f"{page} does not say: {sentence}"


def ratios(*sweeps: Mapping[str, Any], of: str = "word_perplexity") -> Ratios:
    """What each cut costs, as a ratio to the uncut model, by method, score and key dim."""
    return {
        (row["method"], row["score"], row["key_dim"]): row[of] / sweep["uncut"][of]
        for sweep in sweeps
        for row in sweep["rows"]
    }


def found(sweep: Mapping[str, Any], method: str, key_dim: int, score: str = "kq") -> Any:
    """The row of a sweep."""
    wanted = (method, score, key_dim)
    return next(row for row in sweep["rows"] if (row["method"], row["score"], row["key_dim"]) == wanted)


def sweeps(size: str, *kinds: str):
    """Those of one of the 30M models; of the bundled model there is one."""
    return [record(f"sweep-{SIZES[size]}-{kind}" if size in SIZES else size) for kind in kinds]


def remembered() -> dict[tuple[str, int, str], list[float]]:
    """For every seed the mean over numbers of pairs, as `eval --associative` gives it."""
    made = record("recall")
    return {
        (row["model"], row["key_dim"], row["what"]): [
            statistics.mean(right / asked for right, asked in zip(seed, made["questions"], strict=True))
            for seed in row["right"]
        ]
        for row in made["rows"]
    }


def asked_to_remember() -> tuple[int, int]:
    """How many seeds every model was asked with, and how many questions in all."""
    made = record("recall")
    (seeds,) = {len(row["right"]) for row in made["rows"]}
    return seeds, seeds * sum(made["questions"])


def standard_errors(scores: Iterable[list[float]]) -> list[float]:
    """In points, over the seeds."""
    return [100 * statistics.stdev(seeds) / len(seeds) ** 0.5 for seeds in scores]
