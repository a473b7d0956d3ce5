"""JSON as files: objects read with one line on what is wrong, and written whole or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from slimstate.system.atomic import write_text
from slimstate.system.errors import ModelError, SlimstateError

JsonObject: TypeAlias = dict[str, Any]  # what a JSON file holds, before anything is known of it


def read_json(path: Path, error: type[SlimstateError] = ModelError) -> JsonObject:
    """The JSON object in a file; what is wrong with it is raised as `error`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as reason:
        raise error(f"cannot read {path}: {reason.strerror}") from reason
    except (ValueError, RecursionError) as reason:
        raise error(f"{path} is not JSON: {reason}") from reason
    if not isinstance(data, dict):
        raise error(f"{path} is not a JSON object")
    return data


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
