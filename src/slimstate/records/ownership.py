"""Which files slimstate has written and may therefore replace.

A record has a kind; what is drawn from records is ours where one of them is beside it; a model folder of ours has a
`slimstate` entry in its config and a record beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slimstate.core.file_names import PLAN
from slimstate.records.training import RECOVERY, TRAINING
from slimstate.system.atomic import check_place
from slimstate.system.errors import DataError, OutputError
from slimstate.system.json_files import read_json

DRAWN = (".csv", ".md", ".tex", ".png", ".pdf")


def check_record(path: Path) -> None:
    """Refuse to replace a file that is not a record."""
    if path.exists() and not _has_entry(path, "kind", str):
        raise OutputError(f"{path} exists and is not a slimstate record: choose another place")


def check_drawn(folder: Path, names: Iterable[str], beside: str) -> None:
    """Refuse to replace tables and figures without a record beside them; `names` and `beside` are patterns."""
    for path in (path for name in names for path in folder.glob(name) if path.suffix in DRAWN):
        if not any(_has_entry(record, "kind", str) for record in folder.glob(beside)):
            raise OutputError(f"{path} exists and no slimstate record is beside it: choose another place")


def check_model_folder(out: Path, force: bool) -> None:
    """Refuse an output folder that cannot be written or exists; `force` replaces one that slimstate wrote."""
    check_place(out, folder=True)
    if not out.exists():
        return
    if not force:
        raise OutputError(f"{out} exists already; choose another folder or use `force`")
    recorded = any((out / name).is_file() for name in (PLAN, RECOVERY, TRAINING))
    if any(out.iterdir()) and not (recorded and _has_entry(out / "config.json", "slimstate", dict)):
        raise OutputError(f"{out} was not written by slimstate and is not replaced: choose another folder or remove it")


def _has_entry(path: Path, name: str, kind: type) -> bool:
    try:
        return path.is_file() and isinstance(read_json(path, DataError).get(name), kind)
    except DataError:
        return False
