"""Which model folders slimstate has made, and may therefore replace. Nothing is written for that alone.

A model folder of ours says in its config what was done to the model, and holds the record of it.
"""

from __future__ import annotations

from pathlib import Path

from slimstate.core.file_names import PLAN
from slimstate.records.training import RECOVERY, TRAINING
from slimstate.system.atomic import check_place
from slimstate.system.errors import ModelError, OutputError
from slimstate.system.json_files import read_json


def is_our_model(folder: Path) -> bool:
    """Whether slimstate has written a model folder."""
    if not any((folder / name).is_file() for name in (PLAN, RECOVERY, TRAINING)):
        return False
    config = folder / "config.json"
    try:
        return config.is_file() and isinstance(read_json(config).get("slimstate"), dict)
    except ModelError:
        return False


def check_free(out: Path, force: bool) -> None:
    """Refuse a place for a model where nothing can be written, or that is taken; by others, whatever is asked for."""
    check_place(out, folder=True)
    if not out.exists():
        return
    if not force:
        raise OutputError(f"{out} exists already; choose another place or use `force`")
    if any(out.iterdir()) and not is_our_model(out):
        raise OutputError(
            f"{out} is no model folder that slimstate wrote, and is not replaced: choose another place or remove it"
        )
