"""What all records have in common: a kind, a format number, a JSON file, and how they are shown."""

import functools
import html
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from slimstate.records.schema import ValidationError, Value, from_json, to_json
from slimstate.system.errors import DataError, quoted
from slimstate.system.json_files import JsonObject, read_json, write_json

R = TypeVar("R", bound="Record")
PACKAGES = (
    "slimstate", "torch", "transformers", "flash-linear-attention", "triton", "safetensors", "lm-eval", "peft",
    "accelerate",
)  # fmt: skip
MAX_ROWS = 40  # of a table that is printed
FORMAT = {"index": False, "na_rep": "", "float_format": "{:.4g}".format}


class Displayable(Value):
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
        frame = self.to_dataframe().dropna(axis="columns", how="all")
        more = f"<p>… {len(frame) - MAX_ROWS} rows more</p>" if len(frame) > MAX_ROWS else ""
        return f"<p>{headline}</p>{frame.head(MAX_ROWS).to_html(**FORMAT)}{more}{written}"


class Record(Displayable):
    """One result, as a frozen value with a file format."""

    KIND: ClassVar[str]
    FORMAT: ClassVar[int] = 1  # one more whenever files of the format before can no longer be read

    def to_json(self) -> JsonObject:
        return {"kind": self.KIND, "format": self.FORMAT, **super().to_json()}

    @classmethod
    def from_json(cls: type[R], data: Mapping[str, object]) -> R:
        """Return the record in a JSON object; raise a one-line ValidationError where it is not valid."""
        if not isinstance(data, Mapping):
            raise ValidationError("expected an object")
        if (number := data.get("format", cls.FORMAT)) != cls.FORMAT:
            raise ValidationError(f"format must be {cls.FORMAT}, got {quoted(number)}")
        record = cls.parse(data)
        if (reason := record.contradiction()) is not None:
            raise ValidationError(reason)
        return record

    @classmethod
    def parse(cls: type[R], data: Mapping[str, object]) -> R:
        """Return the record by the annotations of its fields."""
        return from_json(cls, data)

    def contradiction(self) -> str | None:
        """Return why fields of the right types do not fit each other, or None."""
        return None

    def write(self, path: Path) -> None:
        """Write the record as JSON, whole or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def read(cls: type[R], path: Path) -> R:
        """Return the record in a JSON file."""
        try:
            return cls.from_json(read_json(path, DataError))
        except ValidationError as error:
            raise DataError(f"{path} is not a valid {cls.KIND} record: {error}") from error


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a result."""
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            continue
    return numbers
