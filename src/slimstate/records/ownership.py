"""Which files slimstate has written, and may therefore replace, in folders that hold other files too.

A record has a kind. What is drawn from records is ours where one of them is beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slimstate.system.errors import DataError, OutputError
from slimstate.system.json_files import read_json

DRAWN = (".csv", ".md", ".tex", ".png", ".pdf")


def is_record(path: Path) -> bool:
    """Return whether a file is a record of any kind."""
    try:
        return path.is_file() and isinstance(read_json(path, DataError).get("kind"), str)
    except DataError:
        return False


def check_record(path: Path) -> None:
    """Refuse to replace a file that is not a record."""
    if path.exists() and not is_record(path):
        raise OutputError(f"{path} exists and is not a slimstate record: choose another place")


def check_drawn(folder: Path, names: Iterable[str], beside: str) -> None:
    """Refuse to replace tables and figures without a record beside them; `names` and `beside` are patterns."""
    for path in (path for name in names for path in folder.glob(name) if path.suffix in DRAWN):
        if not any(map(is_record, folder.glob(beside))):
            raise OutputError(f"{path} exists and no slimstate record is beside it: choose another place")
