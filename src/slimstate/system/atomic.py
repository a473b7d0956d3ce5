"""Write files and folders that appear complete or not at all. No other module opens an output.

Everything is written to a staging folder, a hidden sibling of the output, and moved to its place when all went well.
The folder is named after its process, so that what a killed one has left can be recognised. The lock of `STOP` is
held during every step that a stop must not cut in two.
"""

import ctypes
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from slimstate.system.errors import OutputError
from slimstate.system.interruption import STOP
from slimstate.system.shortages import is_disk_full

KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
OLD = "-old"  # ends the name of a folder that was moved aside
STAGING = re.compile(r"\.(?P<name>.+)\.partial-(?P<host>.+)-(?P<process>\d{1,9})(?P<old>-old)?")
RENAME_EXCHANGE, AT_FDCWD = 2, -100  # of Linux: <linux/fs.h>, <fcntl.h>


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file there takes the place of `path` at the end."""
    check_kind(path, folder=False)
    with staging_folder(path) as staging:
        yield staging / path.name
        with writing(path):
            _move({staging / path.name: path})


@contextmanager
def staged_files(folder: Path) -> Iterator[Path]:
    """Yield a folder to write several files to, which all move to `folder` at the end."""
    check_kind(folder, folder=True)
    is_new = not folder.exists()
    with writing(folder), staging_folder(folder if is_new else folder / "results") as staging:
        yield staging
        if is_new:
            publish(staging, folder, force=False)
        else:  # records first: they say what the other files belong to
            files = sorted(staging.iterdir(), key=lambda path: (path.suffix != ".json", path.name))
            _move({path: folder / path.name for path in files})


@contextmanager
def staged_folder(out: Path, force: bool) -> Iterator[Path]:
    """Yield a folder to write to, which becomes `out` in one step at the end; `force` replaces what is there."""
    with writing(out), staging_folder(out) as staging:
        yield staging
        publish(staging, out, force)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn errors of the system into an `OutputError` that names `out`."""
    try:
        yield
    except OutputError:
        raise
    except Exception as error:
        staged = map(STAGING.fullmatch, out.parts)
        place = Path(*(match["name"] if match else part for match, part in zip(staged, out.parts, strict=True)))
        if is_disk_full(error):
            raise OutputError(f"no space left for {place}; nothing of it was written") from error
        if isinstance(error, OSError):
            raise OutputError(f"cannot write {place}: {error.strerror or error}") from error
        raise


@contextmanager
def staging_folder(out: Path) -> Iterator[Path]:
    """Yield an empty hidden sibling of `out`, and remove it at the end unless it was moved."""
    out = Path(os.path.abspath(out))
    staging = staging_path(out)
    with ExitStack() as stack:
        with writing(out):
            stack.enter_context(create_folder(out.parent))
            remove_leftovers(out.parent)
            remove(staging)  # of an earlier process that had the id of this one
            stack.enter_context(STOP.removing(staging))
            stack.callback(remove, staging)
            with STOP.lock:  # a process that is ending creates nothing more
                staging.mkdir()
        yield staging


@contextmanager
def create_folder(folder: Path) -> Iterator[None]:
    """Create a folder and its parents; at the end remove those of them that are empty."""
    with ExitStack() as stack:
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                stack.enter_context(STOP.removing_if_empty(path))
                stack.callback(remove_if_empty, path)
                with suppress(FileExistsError), STOP.lock:  # another process may be faster
                    path.mkdir()
        yield


def create_parents(path: Path, staging: Path) -> None:
    """Create the folders between a staging folder and a path in it, but not that folder: a stop may have removed it."""
    for folder in reversed(path.relative_to(staging).parents[:-1]):
        (staging / folder).mkdir(exist_ok=True)


def copy_files(source: Path, target: Path) -> None:
    """Copy a file, or a folder with all that is in it; the folder of `target` must exist."""
    for path in (source, *sorted(source.rglob("*"))):
        copy = target / path.relative_to(source)
        copy.mkdir(exist_ok=True) if path.is_dir() else shutil.copyfile(path, copy)


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def publish(staging: Path, out: Path, force: bool) -> None:
    """Move a folder to `out` in one step, once all of it is on the disk."""
    out = Path(os.path.abspath(out))
    for path in staging.rglob("*"):
        _set_mode(path, staging)
        flush_to_disk(path)
    check_kind(out, folder=True)
    with STOP.lock:
        if force and out.exists():
            _exchange(staging, out)
        else:
            staging.rename(out)
        STOP.add_output(out)


def _move(files: dict[Path, Path]) -> None:
    """Move files from a staging folder to their places and replace what is there."""
    for target in files.values():
        check_kind(target, folder=False)
    for path in files:
        _set_mode(path, path.parent)
    with STOP.lock:
        for path, target in files.items():
            path.replace(target)
            STOP.add_output(target)


def _set_mode(path: Path, folder: Path) -> None:
    """Give a file the permissions of its folder: some libraries create files that only their owner can read."""
    if path.is_file() and not path.is_symlink():
        path.chmod(folder.stat().st_mode & 0o666)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step where the system can; otherwise move the old one aside first."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    paths = AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old)
    if rename is not None and rename(*paths, RENAME_EXCHANGE) == 0:
        return
    aside = new.with_name(new.name + OLD)
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def staging_path(out: Path) -> Path:
    """Return the staging folder of this process for `out`."""
    return out.parent / f".{out.name}.partial-{socket.gethostname()}-{os.getpid()}"


def remove_leftovers(folder: Path) -> None:
    """Remove staging folders of killed processes of this machine, and put back what they had moved aside."""
    for path in folder.glob(".*.partial-*"):
        match = STAGING.fullmatch(path.name)
        if match is None or match["host"] != socket.gethostname() or psutil.pid_exists(int(match["process"])):
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


def flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def overlap(out: Path, other: Path) -> bool:
    """Return whether two paths are the same or one lies in the other."""
    with writing(out):  # a name that is too long, a folder without permission
        first, second = out.resolve(), other.resolve()
        return first == second or first in second.parents or second in first.parents


def check_kind(path: Path, *, folder: bool) -> None:
    """Refuse to write to a link, a pipe or a device, to a folder as a file, or to a file as a folder."""
    try:
        mode = Path(os.path.abspath(path)).lstat().st_mode  # abspath: x/.. is a folder whether or not x exists
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    expected = "folder" if folder else "file"
    if stat.S_ISLNK(mode):
        raise OutputError(f"{path} is a link; name the {expected} itself")
    kind = KINDS.get(stat.S_IFMT(mode))
    if kind is None and stat.S_ISDIR(mode) != folder:
        kind = "a file" if folder else "a folder"
    if kind is not None:
        raise OutputError(f"{path} is {kind}; `out` must be a {expected}")


def check_place(path: Path, *, folder: bool) -> None:
    """Refuse a path that cannot be written, before the work that would be lost; create nothing."""
    check_kind(path, folder=folder)
    with writing(path), suppress(FileNotFoundError, NotADirectoryError):
        staging_path(path).lstat()  # whose name must not be too long either
    with writing(path):  # a folder without permission
        existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if existing != path and not existing.is_dir():
        raise OutputError(f"cannot write {path}: {existing} is a file")
    if not os.access(existing, os.W_OK):
        raise OutputError(f"cannot write {path}: no permission in {existing}")


def write_text(path: Path, text: str) -> None:
    """Write a text file, complete or not at all."""
    with writing(path), staged_file(path) as file:
        file.write_bytes(text.encode("utf-8", "backslashreplace"))  # a name in it may not be UTF-8
