"""Folders and files that appear whole or not at all. This is the one place that opens outputs."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from slimstate.system import leftovers
from slimstate.system.errors import OutputError
from slimstate.system.interruption import STOP
from slimstate.system.leftovers import OLD
from slimstate.system.shortages import no_room

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
UMASK = os.umask(0)  # which can be asked for only by setting it
os.umask(UMASK)
MODE = 0o666 & ~UMASK


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """A file elsewhere that takes the place of `path` when all went well, so that a reader never sees half of it."""
    check_kind(path, folder=False)
    with partial(path) as folder:
        yield folder / path.name
        with writing(path):
            _move({folder / path.name: path})


@contextmanager
def staged_files(folder: Path) -> Iterator[Path]:
    """A place for several files, which all go to `folder` when all went well."""
    check_kind(folder, folder=True)
    new = not folder.exists()
    with writing(folder), partial(folder if new else folder / "results") as staging:
        yield staging
        if new:
            publish(staging, folder, force=False)
        else:
            _move({path: folder / path.name for path in sorted(staging.iterdir(), key=_records_first)})


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
    except OutputError:
        raise
    except Exception as error:
        if no_room(error):
            raise OutputError(f"no space left for {out}; nothing of it was written") from error
        if isinstance(error, OSError):
            raise OutputError(f"cannot write {out}: {error.strerror or error}") from error
        raise


@contextmanager
def partial(out: Path) -> Iterator[Path]:
    """A hidden sibling of `out`, empty; unless it is published it vanishes, with the folders that were made for it."""
    out = Path(os.path.abspath(out))
    staging = leftovers.partial_of(out)
    with ExitStack() as stack:
        with writing(out):
            stack.enter_context(made(out.parent))
            leftovers.clear(out.parent)
            leftovers.discard(staging)  # of an earlier process that had this one's number
            stack.enter_context(STOP.unfinished(staging))
            stack.callback(leftovers.discard, staging)
            with STOP.lock:  # a process that is ending makes nothing more
                staging.mkdir()
        yield staging


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """A folder, and those above it; of those that were not there the empty ones go again."""
    with ExitStack() as stack:
        for place in (*reversed(folder.parents), folder):
            if not place.exists():
                stack.enter_context(STOP.made_for_it(place))
                stack.callback(remove_empty, place)
                with suppress(FileExistsError), STOP.lock:  # somebody else was faster
                    place.mkdir()
        yield


def remove_empty(folder: Path) -> None:
    """Where it is."""
    with suppress(OSError):
        folder.rmdir()


def publish(staging: Path, out: Path, force: bool) -> None:
    """Let the sibling take the place of `out` in one step, once all of it is on the disk."""
    out = Path(os.path.abspath(out))
    for path in staging.rglob("*"):
        as_others_are(path)
        flush_to_disk(path)
    check_kind(out, folder=True)
    with STOP.lock:
        if force and out.exists():
            _exchange(staging, out)
        else:
            staging.rename(out)
        STOP.written(out)


def _records_first(path: Path) -> tuple[bool, str]:
    """By which it is known whose the others are."""
    return path.suffix != ".json", path.name


def _move(files: dict[Path, Path]) -> None:
    """Every file to its place; what is there is replaced."""
    for target in files.values():
        check_kind(target, folder=False)
    for path in files:
        as_others_are(path)
    with STOP.lock:
        for path, target in files.items():
            path.replace(target)
            STOP.written(target)


def as_others_are(path: Path) -> None:
    """The mode of any new file: some libraries make theirs for their owner alone."""
    if path.is_file() and not path.is_symlink():
        path.chmod(MODE)


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


def flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def overlap(out: Path, other: Path) -> bool:
    """Whether what will be written is, holds or lies in the other place."""
    with writing(out):  # a name that is too long, a folder that may not be looked into
        ours, theirs = out.resolve(), other.resolve()
        return ours == theirs or ours in theirs.parents or theirs in ours.parents


def check_kind(path: Path, *, folder: bool) -> None:
    """Refuse what is no plain file or folder: it would be replaced, or written into without end."""
    try:
        mode = Path(os.path.abspath(path)).lstat().st_mode  # what lies at x/.. is a folder, whether x is there or not
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    wanted = "folder" if folder else "file"
    if stat.S_ISLNK(mode):
        raise OutputError(f"{path} is a link; name the {wanted} itself")
    if (kind := KINDS.get(stat.S_IFMT(mode))) is not None:
        raise OutputError(f"{path} is {kind}; `out` is a {wanted}")
    if stat.S_ISDIR(mode) != folder:
        raise OutputError(f"{path} is a {'file' if folder else 'folder'}; `out` is a {wanted}")


def check_place(path: Path, *, folder: bool) -> None:
    """Refuse a place where nothing can be written, before the work that would be lost; nothing is made there yet."""
    check_kind(path, folder=folder)
    with writing(path), suppress(FileNotFoundError, NotADirectoryError):
        leftovers.partial_of(path).lstat()  # its name must not be too long either
    with writing(path):  # a folder that may not be looked into
        above = next(place for place in (path, *path.absolute().parents) if place.exists())
    if above != path and not above.is_dir():
        raise OutputError(f"cannot write {path}: {above} is a file")
    if not os.access(above, os.W_OK):
        raise OutputError(f"cannot write {path}: no permission in {above}")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    with writing(path), staged_file(path) as file:
        file.write_bytes(text.encode("utf-8", "backslashreplace"))  # a name may hold what is no UTF-8
