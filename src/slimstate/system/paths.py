"""Names of files as people type them."""

from __future__ import annotations

from os import PathLike
from pathlib import Path


def expanded(name: str | PathLike[str]) -> Path:
    """With the home folder for a ~; that of nobody stands for itself, and is then missed by its name."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)
