"""A folder for one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slimstate.system.errors import OutputError


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """This process alone works in a folder, which is there. The system lets go of it whatever ends the process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, folder)
        if not (folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())):
            raise _taken(folder)  # which has just removed it
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    with suppress(OSError):  # a file system that knows no locks
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _taken(folder) from error


def _taken(folder: Path) -> OutputError:
    return OutputError(f"another process works in {folder}: wait for its end, or choose another place")
