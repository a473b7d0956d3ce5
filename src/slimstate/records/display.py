"""How results are shown in a terminal and in notebooks, and become a dict or a DataFrame."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimstate.records.schema import to_json
from slimstate.system.json_files import JsonObject

MAX_ROWS = 40  # of a table that is printed


class Displayable:
    """A dataclass with results: `print` shows a headline and a table."""

    def to_json(self) -> JsonObject:
        return dict(to_json(self))

    def headline(self) -> str:
        """Return the result in one line or a few."""
        return type(self).__name__

    def table(self) -> Sequence[Mapping[str, object]]:
        """Return the rows of the result: by default one with its plain fields."""
        return [{name: value for name, value in vars(self).items() if isinstance(value, (str, int, float))}]

    @property
    def path(self) -> Path | None:
        """The file or folder that was written, or None."""
        out = getattr(self, "out", None)
        return None if out is None else Path(out)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in the JSON record."""
        return self.to_json()

    def to_dataframe(self) -> Any:
        """Return the table of the result as a `pandas.DataFrame`."""
        import pandas

        return pandas.DataFrame(list(self.table()))

    def __str__(self) -> str:
        written = [] if self.path is None else [f"written to {self.path}"]
        return "\n".join([self.headline(), *_text_table(self.table()), *written])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the result in IPython."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show the result in a notebook."""
        names, *rows = _cells(self.table())
        cells = [[f"<th>{html.escape(name)}</th>" for name in names]]
        cells += [[f"<td>{html.escape(cell)}</td>" for cell in row] for row in rows]
        table = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
        headline = "<br>".join(html.escape(line) for line in self.headline().splitlines())
        written = "" if self.path is None else f"<p>written to <code>{html.escape(str(self.path))}</code></p>"
        return f"<p>{headline}</p><table>{table}</table>{written}"


def _cells(rows: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Return the first rows of a table as text, below the names of the columns."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [columns, *([format_cell(row.get(name)) for name in columns] for row in rows[:MAX_ROWS])]


def _text_table(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Yield the lines of a table, numbers to the right."""
    cells = _cells(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(isinstance(row.get(name), (int, float, type(None))) for row in rows) for name in cells[0]]
    for line in cells:
        columns = zip(line, widths, numeric, strict=True)
        yield "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns).rstrip()
    if len(rows) > MAX_ROWS:
        yield f"… {len(rows) - MAX_ROWS} rows more"


def format_cell(value: object) -> str:
    """Return a number with four significant digits, a list shortened, and None as nothing."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        first = ", ".join(map(str, value[:6]))
        return first if len(value) <= 6 else f"{first}, … {value[-1]}"
    return str(value)
