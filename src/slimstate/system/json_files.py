"""JSON as files: objects read with one line on what is wrong, and written whole or not at all.

What is read is bounded, in bytes and in depth, and holds no text that could not be written again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from slimstate.system.atomic import write_text
from slimstate.system.errors import ModelError, SlimstateError, named, quoted, reason_of
from slimstate.system.input_files import read_bytes

JsonObject: TypeAlias = dict[str, Any]  # what a JSON file holds, before anything is known of it
MOST_BYTES = 2**26  # of a file; those of the largest models have a few MiB
DEEPEST = 64  # brackets in brackets


def read_json(path: Path, error: type[SlimstateError] = ModelError, most: int = MOST_BYTES) -> JsonObject:
    """The JSON object in a file; what is wrong with it is raised as `error`."""
    return parse_json(read_bytes(path, error, most), named(path), error)


def read_any(path: Path, error: type[SlimstateError], most: int) -> Any:
    """What JSON there is in a file that may hold anything; the file itself is "it" in what is raised."""
    return _parsed(read_bytes(path, error, most), "it", error)


def parse_json(
    data: bytes | str, where: str, error: type[SlimstateError] = ModelError, *, names_once: bool = False
) -> JsonObject:
    """The same of what was read from `where`; with `names_once`, no object may have a name twice."""
    found = _parsed(data, where, error, names_once=names_once)
    if not isinstance(found, dict):
        raise error(f"{where} is not a JSON object")
    return found


def _parsed(data: bytes | str, where: str, error: type[SlimstateError], *, names_once: bool = False) -> Any:
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        found = json.loads(text, object_pairs_hook=_once if names_once else None)
    except (ValueError, RecursionError) as reason:
        raise error(f"{where} is not JSON: {reason_of(reason)}") from reason
    if (words := _strangeness(found)) is not None:
        raise error(f"{where} {words}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name in found if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"{quoted(twice)} stands there twice")
    return found


def _strangeness(tree: Any) -> str | None:
    """What no file of ours or of a model has, though it is JSON."""
    level: list[Any] = [tree]
    for _ in range(DEEPEST):
        names = [name for each in level if isinstance(each, dict) for name in each]
        if not all(is_unicode(text) for text in (*names, *level) if isinstance(text, str)):
            return "holds text that is not Unicode (half of a surrogate pair)"
        level = [item for each in level if isinstance(each, (dict, list)) for item in _items(each)]
        if not level:
            return None
    return f"is nested more than {DEEPEST} deep"


def _items(tree: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return tree.values() if isinstance(tree, dict) else tree


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: it has no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """One line for each field, so that a file can be looked at and two of them compared."""
    lines = (f" {json.dumps(key)}: {json.dumps(plain(value), allow_nan=False)}" for key, value in record.items())
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def plain(value: Any, digits: int | None = None) -> Any:
    """As strict JSON has it: lists and dicts, no infinities (None), floats to so many significant digits."""
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


def difference(found: Mapping[str, object], wanted: Mapping[str, object]) -> str | None:
    """The first setting that was another one when `found` was written; None where all are the same."""
    ours = plain(wanted)
    return next((f"{name} {found.get(name)}, now {ours[name]}" for name in ours if found.get(name) != ours[name]), None)
