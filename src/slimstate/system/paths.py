"""Paths as people type them."""

from __future__ import annotations

import os
from pathlib import Path


def expand_home(name: str | os.PathLike[str]) -> Path:
    """Return a path with ~ replaced by the home folder; that of an unknown user stays as it is."""
    return Path(os.path.expanduser(name))
