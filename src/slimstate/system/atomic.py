"""Folders and files that appear whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slimstate.system.errors import OutputError

OLD = "-old"  # ends the name of what steps aside


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """A hidden sibling of `path` that takes its place when all went well, so that a reader never sees half of it."""
    sibling = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield sibling
        sibling.replace(path)
    finally:
        with suppress(OSError):
            sibling.unlink()


@contextmanager
def staged(out: Path, force: bool) -> Iterator[Path]:
    """A hidden sibling of `out` that becomes `out` in one step when all went well, and vanishes when it did not."""
    with writing(out), partial(out) as staging:
        yield staging
        publish(staging, out, force)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """What the system says when `out` cannot be written, in words."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(f"no space left for {out}; nothing was written") from error
        raise OutputError(f"cannot write {out}: {error.strerror or error}") from error


@contextmanager
def partial(out: Path) -> Iterator[Path]:
    """A hidden sibling of `out`, empty; unless it is published it vanishes, with the folders that were made for it."""
    out = Path(os.path.abspath(out))
    staging = out.parent / f".{out.name}.partial-{socket.gethostname()}-{os.getpid()}"
    made: list[Path] = []
    try:
        with writing(out):
            for folder in reversed(out.parents):
                if not folder.exists():
                    with suppress(FileExistsError):  # somebody else was faster
                        folder.mkdir()
                        made.append(folder)
            _remove_abandoned(out)
            _discard(staging)  # of an earlier process that had this one's number
            staging.mkdir()
        yield staging
    finally:
        _discard(staging)
        for folder in reversed(made):
            with suppress(OSError):  # one that is not empty
                folder.rmdir()


def publish(staging: Path, out: Path, force: bool) -> None:
    """Let the sibling take the place of `out` in one step, once all of it is on the disk."""
    out = Path(os.path.abspath(out))
    for path in staging.rglob("*"):
        flush_to_disk(path)
    if force and out.exists():
        _exchange(staging, out)
    else:
        staging.rename(out)


def _discard(staging: Path) -> None:
    """Remove what was not published, or what it has replaced."""
    shutil.rmtree(staging, ignore_errors=True)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step where the system can; else the old one steps aside first."""
    exchange, here = 2, -100  # RENAME_EXCHANGE, AT_FDCWD
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(here, os.fsencode(new), here, os.fsencode(old), exchange) == 0:
        return
    aside = new.with_name(new.name + OLD)
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _remove_abandoned(out: Path) -> None:
    """Staging folders that a killed run of this machine left behind; what it had put aside comes back."""
    prefix = f".{out.name}.partial-{socket.gethostname()}-"
    for path in out.parent.glob(f"{prefix}*"):
        owner = path.name.removeprefix(prefix).removesuffix(OLD)
        if owner.isdigit() and not _alive(int(owner)):
            if path.name.endswith(OLD) and not out.exists():
                path.rename(out)
            else:
                _discard(path)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_place(path: Path, *, folder: bool) -> None:
    """Refuse a place where nothing can be written, before the work that would be lost; nothing is made there yet."""
    if path.exists() and path.is_dir() != folder:
        raise OutputError(f"{path} is a {'file' if folder else 'folder'}; `out` is a {'folder' if folder else 'file'}")
    above = next(place for place in (path, *path.absolute().parents) if place.exists())
    if above != path and not above.is_dir():
        raise OutputError(f"cannot write {path}: {above} is a file")
    if not os.access(above, os.W_OK):
        raise OutputError(f"cannot write {path}: no permission in {above}")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    try:
        with staged_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
