"""Records: plain JSON objects, the only thing that passes from measuring to drawing.

A record says what `kind` it is, what was measured, on what, by which software, and the command that measures it again.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slimstate.system.atomic import staged_file
from slimstate.system.errors import DataError, OutputError

PACKAGES = (
    "slimstate", "torch", "transformers", "flash-linear-attention", "triton", "safetensors", "lm-eval", "peft",
    "accelerate",
)  # fmt: skip
PLAN = "slimstate_plan.json"
RECOVERY = "slimstate_recovery.json"
TRAINING = "slimstate_training.json"
UNINFORMED = ("random", "random-rotation")  # methods that look at nothing: keys and queries are the same to them
KINDS = ("sweep", "plan", "recovery", "trace", "filters", "evaluation")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def command(verb: str, arguments: Sequence[object], options: Mapping[str, object]) -> str:
    """The command line that does this again; options that are None or False are left out."""
    words = ["slimstate", verb, *map(str, arguments)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            joined = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            words += [flag, joined]
    return shlex.join(words)


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


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first setting that was another one when `found` was written; None where all are the same."""
    ours = plain(wanted)
    return next((f"{name} {found.get(name)}, now {ours[name]}" for name in ours if found.get(name) != ours[name]), None)


def check_place(path: Path, *, folder: bool) -> None:
    """Refuse a place where nothing can be written, before the work that would be lost; nothing is made there yet."""
    if path.exists() and path.is_dir() != folder:
        raise OutputError(f"{path} is a {'file' if folder else 'folder'}; --out is a {'folder' if folder else 'file'}")
    above = next(place for place in (path, *path.absolute().parents) if place.exists())
    if above != path and not above.is_dir():
        raise OutputError(f"cannot write {path}: {above} is a file")
    if not os.access(above, os.W_OK):
        raise OutputError(f"cannot write {path}: no permission in {above}")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    try:
        with staged_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """One line for each field, so that a record can be looked at and two of them compared."""
    lines = (f" {json.dumps(key)}: {json.dumps(plain(value), allow_nan=False)}" for key, value in record.items())
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of an evaluation: what it is of, its name in a comparison, and whether more of it is better."""

    group: str
    name: str
    label: str
    value: float | None
    more_is_better: bool | None
    error: float | None = None


def measures(result: Mapping[str, Any]) -> Iterator[Measure]:
    """Every number of an evaluation that can be compared with that of another model."""
    if result.get("perplexity") is not None:
        yield Measure(
            group="text", name="perplexity", label="perplexity", value=result["perplexity"], more_is_better=False
        )
    for point in (result.get("associative_recall") or {}).get("points", ()):
        label = f"{point['pairs']} pairs"
        yield Measure(
            group="recall", name=f"associative recall, {label}", label=label, value=point["accuracy"],
            more_is_better=True, error=point.get("stderr"),
        )  # fmt: skip
    lm_eval = result.get("lm_eval") or {}
    for task, entry in (lm_eval.get("tasks") or {}).items():
        better, errors = entry.get("higher_is_better") or {}, entry.get("stderr") or {}
        for metric, value in entry["metrics"].items():
            yield Measure(
                group=task, name=f"{task} {metric}", label=metric, value=value,
                more_is_better=better.get(metric), error=errors.get(metric),
            )  # fmt: skip
    for average, value in (lm_eval.get("averages") or {}).items():
        name = f"{average.replace('_', '-')} average"
        yield Measure(group="average", name=name, label=name, value=value, more_is_better=True)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A record and the file it came from."""

    path: Path
    kind: str
    data: dict[str, Any]


def read_records(folder: Path) -> tuple[list[Found], list[str]]:
    """Every record under a folder, and a line on each file that looked like one and could not be read.

    Of a model folder only what slimstate wrote is read; JSON files that are no record are passed over.
    """
    if not folder.is_dir():
        raise DataError(f"no folder {folder}")
    found, complaints = [], []
    for path in sorted(folder.rglob("*.json")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or ((path.parent / "config.json").exists() and path.name not in (PLAN, RECOVERY)):
            continue
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            complaints.append(f"{path} was skipped: it is not JSON ({error})")
            continue
        kind = "plan" if path.name == PLAN else data.get("kind") if isinstance(data, dict) else None
        if kind in KINDS:
            found.append(Found(path=path, kind=str(kind), data=data))
    return found, complaints
