"""What all records have in common: a kind, a format number, and that each writes and reads itself.

A record is what passes from measuring to drawing. It says what was measured, on what, by which software, and the
command that measures it again.
"""

from __future__ import annotations

import functools
import platform
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from slimstate.records.schema import Misfit, read, written
from slimstate.records.shown import Shown
from slimstate.system.errors import DataError
from slimstate.system.json_files import JsonObject, read_json, write_json

R = TypeVar("R", bound="Record")
PACKAGES = (
    "slimstate", "torch", "transformers", "flash-linear-attention", "triton", "safetensors", "lm-eval", "peft",
    "accelerate",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Record(Shown):
    """One result, as a frozen value that writes and reads itself."""

    KIND: ClassVar[str]
    FORMAT: ClassVar[int] = 1  # one more whenever files of the format before are no longer read as they are

    def to_json(self) -> JsonObject:
        return {"kind": self.KIND, "format": self.FORMAT, **written(self)}

    @classmethod
    def from_json(cls: type[R], data: Mapping[str, object]) -> R:
        """The record in a JSON object; `Misfit` says what it lacks. Files of 0.1 name no format: it is 1."""
        form = data.get("format", 1)
        if form != cls.FORMAT:
            raise Misfit(f"it is of format {form}, and this version reads format {cls.FORMAT}")
        record = cls.parsed(data)
        if (words := record.contradiction()) is not None:
            raise Misfit(words)
        return record

    @classmethod
    def parsed(cls: type[R], data: Mapping[str, object]) -> R:
        """The record by the annotations of its fields; what they cannot say, `contradiction` does."""
        return read(cls, data)

    def contradiction(self) -> str | None:
        """Where fields of the right types do not fit each other, in words."""
        return None

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def read(cls: type[R], path: Path) -> R:
        try:
            return cls.from_json(read_json(path, DataError))
        except Misfit as error:
            raise DataError(f"{path} is not a record of a {cls.KIND}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class RecordOfModel(Record):
    """A record that lies beside the weights it is of, and leaves an entry in the model's config."""

    FILE: ClassVar[str]
    ENTRIES: ClassVar[str]  # the list in the config's slimstate entry

    @abstractmethod
    def entry(self) -> JsonObject:
        """What the config of the model says of this."""

    def config_after(self, config: Mapping[str, Any]) -> JsonObject:
        """A model's config, with this after what was done to the model before."""
        earlier = dict(config.get("slimstate") or {})
        return {**config, "slimstate": {**earlier, self.ENTRIES: [*earlier.get(self.ENTRIES, []), self.entry()]}}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result."""
    return dict(_installed())


@functools.cache
def _installed() -> Mapping[str, str]:
    """Looked up once: the files that tell take a while to find."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
