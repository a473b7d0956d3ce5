"""Which files slimstate has made, and may therefore replace, in folders where others keep theirs too.

A record is known by its kind. What is drawn from records is ours where one of them lies beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slimstate.system.errors import DataError, OutputError
from slimstate.system.json_files import read_json

DRAWN = (".csv", ".md", ".tex", ".png", ".pdf")


def is_record(path: Path) -> bool:
    try:
        return path.is_file() and isinstance(read_json(path, DataError).get("kind"), str)
    except DataError:
        return False


def check_record(path: Path) -> None:
    """Refuse to replace a file that is no record."""
    if path.exists() and not is_record(path):
        raise OutputError(f"{path} is no record that slimstate wrote, and is not replaced: choose another place")


def check_drawn(folder: Path, names: Iterable[str], beside: str) -> None:
    """Refuse to replace tables and figures where no record lies beside them; names are patterns."""
    matching = (path for name in names for path in folder.glob(name))
    found = next((path for path in matching if path.suffix in DRAWN), None)
    if found is not None and not any(map(is_record, folder.glob(beside))):
        raise OutputError(
            f"{found} is there, and no record of slimstate beside it: it is not replaced; choose another place"
        )
