"""How results are shown in a terminal and in notebooks, and become a dict or a DataFrame."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slimstate.records.schema import to_json
from slimstate.system.json_files import JsonObject

MAX_ROWS = 40  # of a table that is printed
FORMAT = {"index": False, "na_rep": "", "float_format": "{:.4g}".format}


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
        frame = self.to_dataframe().dropna(axis="columns", how="all")
        lines = [self.headline(), *([] if frame.empty else [frame.head(MAX_ROWS).to_string(max_colwidth=40, **FORMAT)])]
        lines += [f"… {len(frame) - MAX_ROWS} rows more"] if len(frame) > MAX_ROWS else []
        return "\n".join([*lines, *([] if self.path is None else [f"written to {self.path}"])])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the result in IPython."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show the result in a notebook."""
        headline = html.escape(self.headline()).replace("\n", "<br>")
        written = "" if self.path is None else f"<p>written to <code>{html.escape(str(self.path))}</code></p>"
        frame = self.to_dataframe().dropna(axis="columns", how="all").head(MAX_ROWS)
        return f"<p>{headline}</p>{frame.to_html(**FORMAT)}{written}"
