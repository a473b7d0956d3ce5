"""What a process that was killed left behind: hidden siblings of outputs, each named after the process that made it."""

from __future__ import annotations

import os
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path

OLD = "-old"  # ends the name of what steps aside
PARTIAL = re.compile(r"\.(?P<name>.+)\.partial-(?:(?P<host>.+)-)?(?P<process>\d+)(?P<old>-old)?")


def partial_of(out: Path) -> Path:
    """Where this process makes `out`."""
    return out.parent / f".{out.name}.partial-{socket.gethostname()}-{os.getpid()}"


def is_partial(path: Path) -> bool:
    return PARTIAL.fullmatch(path.name) is not None


def clear(folder: Path) -> None:
    """Remove what processes of this machine were making in a folder when they were killed.

    What one of them had put aside comes back where nothing has taken its place. Files of 0.1 name no machine.
    """
    for path in folder.glob(".*.partial-*"):
        found = PARTIAL.fullmatch(path.name)
        if found is None or found["host"] not in (None, socket.gethostname()) or _alive(int(found["process"])):
            continue
        if found["old"] and not (folder / found["name"]).exists():
            path.rename(folder / found["name"])
        else:
            discard(path)


def discard(path: Path) -> None:
    """Remove what was not published, or what it has replaced."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
