"""The sample records in `records/`, one of every kind, and changes to them."""

import json
from pathlib import Path
from typing import Any

from slimstate.core.file_names import PLAN
from slimstate.system.json_files import write_json

Record = dict[str, Any]
FOLDER = Path(__file__).parent / "records"
PLAN_FILE = f"cut/{PLAN}"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.json"))


def all_records() -> dict[str, Record]:
    return {file: sample(file) for file in FILES}


def sample(file: str, /, **changes: Any) -> Record:
    """Return the sample record of a file, with some fields changed."""
    return {**json.loads((FOLDER / file).read_text()), **changes}


def large_trace(layers: int, heads: int, **changes: Any) -> Record:
    """Return the sample trace as if the model had this many layers and heads, all the same."""
    trace = sample("trace-model.json", layers=list(range(layers)), heads=heads, **changes)
    for name in ("utilisation_by_head", "kappa_by_head", "spectrum"):
        trace[name] = [[trace[name][0][1]] * heads] * layers
    trace["histogram"]["counts"] = [[trace["histogram"]["counts"][0][1]] * heads] * layers
    trace["bounds"] = {name: values * (layers * heads // 4) for name, values in trace["bounds"].items()}  # of 4 heads
    return trace


def write(folder: Path, records: dict[str, Record]) -> Path:
    for name, record in records.items():
        write_json(folder / name, record)
    return folder
