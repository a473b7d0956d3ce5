"""Recognise the model folders that slimstate wrote and may replace: by their config and the record beside it."""

from __future__ import annotations

from pathlib import Path

from slimstate.core.file_names import PLAN
from slimstate.records.training import RECOVERY, TRAINING
from slimstate.system.atomic import check_place
from slimstate.system.errors import ModelError, OutputError
from slimstate.system.json_files import read_json


def is_our_model(folder: Path) -> bool:
    """Return whether slimstate wrote a model folder."""
    if not any((folder / name).is_file() for name in (PLAN, RECOVERY, TRAINING)):
        return False
    config = folder / "config.json"
    try:
        return config.is_file() and isinstance(read_json(config).get("slimstate"), dict)
    except ModelError:
        return False


def check_free(out: Path, force: bool) -> None:
    """Refuse an output folder that cannot be written or exists; `force` replaces one that slimstate wrote."""
    check_place(out, folder=True)
    if not out.exists():
        return
    if not force:
        raise OutputError(f"{out} exists already; choose another folder or use `force`")
    if any(out.iterdir()) and not is_our_model(out):
        raise OutputError(f"{out} was not written by slimstate and is not replaced: choose another folder or remove it")
