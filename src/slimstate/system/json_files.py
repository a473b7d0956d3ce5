"""Read and write JSON files: errors are one line, sizes are limited, and files are written complete or not at all."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from slimstate.system.atomic import write_text
from slimstate.system.errors import ModelError, SlimstateError, quoted, reason_of
from slimstate.system.input_files import read_bytes

JsonObject: TypeAlias = dict[str, Any]  # parsed JSON that was not validated yet
MAX_BYTES = 2**26  # the files of the largest models have a few MiB
MAX_DEPTH = 64  # brackets in brackets


def read_json(path: Path, error: type[SlimstateError] = ModelError, max_bytes: int = MAX_BYTES) -> JsonObject:
    """Return the JSON object in a file; raise `error` if there is none."""
    return parse_json(read_bytes(path, error, max_bytes), quoted(path), error)


def parse_json(
    data: bytes | str, where: str, error: type[SlimstateError] = ModelError, *, unique_names: bool = False
) -> JsonObject:
    """Return the JSON object in text that was read from `where`; optionally require that names are unique."""
    value = parse_any(data, where, error, unique_names=unique_names)
    if not isinstance(value, dict):
        raise error(f"{where} is not a JSON object")
    return value


def parse_any(data: bytes | str, where: str, error: type[SlimstateError], *, unique_names: bool = False) -> Any:
    """Return whatever JSON is in text that was read from `where`."""
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        value = json.loads(text, object_pairs_hook=_unique if unique_names else None)
    except (ValueError, RecursionError) as reason:
        raise error(f"{where} is not JSON: {reason_of(reason)}") from reason
    if (problem := _problem(value)) is not None:
        raise error(f"{where} {problem}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{quoted(next(name for name in names if names.count(name) > 1))} occurs twice")
    return dict(pairs)


def _problem(tree: Any) -> str | None:
    """Return what parsed JSON has that no file of a model or of slimstate has, or None."""
    level: list[Any] = [tree]
    for _ in range(MAX_DEPTH):
        objects = [value for value in level if isinstance(value, dict)]
        names = [name for value in objects for name in value]
        if not all(is_unicode(text) for text in (*names, *level) if isinstance(text, str)):
            return "holds text that is not Unicode (half of a surrogate pair)"
        lists = [value for value in level if isinstance(value, list)]
        level = [item for items in (*lists, *(value.values() for value in objects)) for item in items]
        if not level:
            return None
    return f"is nested more than {MAX_DEPTH} deep"


def is_unicode(text: str) -> bool:
    """Return whether text can be written as UTF-8: it has no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write an object with one line per field, so that files are easy to read and to compare."""
    lines = (f" {json.dumps(key)}: {json.dumps(plain(value), allow_nan=False)}" for key, value in record.items())
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def plain(value: Any, digits: int | None = None) -> Any:
    """Return a value as strict JSON has it: no infinities (None instead), floats with so many significant digits."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, digits) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else float(f"{value:.{digits}g}")
    return value


def difference(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Return the first setting that differs, with its value before and now, or None if all are equal."""
    values = plain(now)
    names = (name for name in values if before.get(name) != values[name])
    return next((f"{name} {before.get(name)}, now {values[name]}" for name in names), None)
