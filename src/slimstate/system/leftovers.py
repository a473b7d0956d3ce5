"""Staging folders of outputs, hidden and named after their process, and what remains of them when it is killed."""

from __future__ import annotations

import os
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path

OLD = "-old"  # ends the name of a folder that was moved aside
STAGING = re.compile(r"\.(?P<name>.+)\.partial-(?P<host>.+)-(?P<process>\d+)(?P<old>-old)?")


def staging_path(out: Path) -> Path:
    """Return the staging folder of this process for `out`."""
    return out.parent / f".{out.name}.partial-{socket.gethostname()}-{os.getpid()}"


def is_staging(path: Path) -> bool:
    return STAGING.fullmatch(path.name) is not None


def clear(folder: Path) -> None:
    """Remove the staging folders of processes of this machine that were killed.

    A folder that such a process had moved aside comes back if nothing has taken its place.
    """
    for path in folder.glob(".*.partial-*"):
        match = STAGING.fullmatch(path.name)
        if match is None or match["host"] != socket.gethostname() or _is_alive(int(match["process"])):
            continue
        if match["old"] and not (folder / match["name"]).exists():
            path.rename(folder / match["name"])
        else:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, where it is there and can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
