"""What a result can do in a notebook: print itself in a few lines, become a dict or a DataFrame, say where it lies."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from slimstate.system.json_files import JsonObject

Cell = object
MOST_ROWS = 40  # of a table that is printed


class Shown:
    """A value whose fields are what was found. `print(result)` tells it in short."""

    def to_json(self) -> JsonObject:
        raise NotImplementedError

    def headline(self) -> str:
        """The result in a line or a few."""
        return type(self).__name__

    def table(self) -> Sequence[Mapping[str, Cell]]:
        """The result as a table: by default one row of its plain fields."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]
        return [{name: value for name, value in found.items() if isinstance(value, (str, int, float))}]

    @property
    def path(self) -> Path | None:
        """The file or folder that was written; None where nothing was."""
        out = getattr(self, "out", None)
        return None if out is None else Path(out)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as the JSON record has them."""
        return dict(self.to_json())

    def to_dataframe(self) -> Any:
        """The table of the result as a `pandas.DataFrame`."""
        import pandas

        return pandas.DataFrame(list(self.table()))

    def __str__(self) -> str:
        lines = [self.headline(), *_aligned(self.table())]
        if self.path is not None:
            lines.append(f"written to {self.path}")
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """What notebooks show."""
        rows = self.table()
        told = "<br>".join(html.escape(line) for line in self.headline().splitlines())
        head = "".join(f"<th>{html.escape(name)}</th>" for name in _columns(rows))
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(told_cell(row.get(name)))}</td>" for name in _columns(rows)) + "</tr>"
            for row in rows[:MOST_ROWS]
        )
        place = "" if self.path is None else f"<p>written to <code>{html.escape(str(self.path))}</code></p>"
        return f"<p>{told}</p><table><tr>{head}</tr>{body}</table>{place}"


def _columns(rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _aligned(rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    """A table in plain text, numbers to the right; the first rows of a long one."""
    columns = _columns(rows)
    shown = rows[:MOST_ROWS]
    cells = [columns, *([told_cell(row.get(name)) for name in columns] for row in shown)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    numeric = [
        all(isinstance(row.get(name), (int, float, type(None))) for row in shown) and bool(shown) for name in columns
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    ]
    return lines if len(rows) <= MOST_ROWS else [*lines, f"… {len(rows) - MOST_ROWS} rows more"]


def told_cell(value: Cell) -> str:
    """A number with four digits that count, a list shortened, nothing as nothing."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        first = ", ".join(map(str, value[:6]))
        return first if len(value) <= 6 else f"{first}, … {value[-1]}"
    return str(value)
