"""Read untrusted files: regular ones, inside their folder, and the same from the first read to the last.

A pipe or a device in place of a file could block forever. A link or a path that leads out of a folder could read a
file that its owner never meant to share.
"""

import os
import stat
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path, PurePosixPath

from slimstate.system.errors import SlimstateError, quoted
from slimstate.system.value import Value

CLOCK_TICK = 0.05  # seconds in which two writes may leave a file with the same times
MAX_FILES = 100_000  # in a model folder
REPOSITORY_PREFIXES = ("models--", "datasets--")  # of folders in the hub's cache
SHARED_BLOBS = ".huggingface-shared-blobs"
TOOL_FOLDERS = (".git", ".cache", "__pycache__")


class Identity(Value):
    """What distinguishes a file from another one in its place, and from itself with other contents.

    Nobody can set back the time of the last change, which has the resolution of a clock tick: the identity of a file
    that was written a moment ago is taken when the tick is over.
    """

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, descriptor: int) -> "Identity":
        wait = os.fstat(descriptor).st_ctime_ns / 1e9 + CLOCK_TICK - time.time()
        if 0 < wait <= CLOCK_TICK:  # otherwise the clock was set back
            time.sleep(wait)
        return cls._read(descriptor)

    @classmethod
    def _read(cls, descriptor: int) -> "Identity":
        status = os.fstat(descriptor)
        return cls(
            device=status.st_dev, inode=status.st_ino, size=status.st_size,
            modified=status.st_mtime_ns, changed=status.st_ctime_ns,
        )  # fmt: skip

    def check(self, path: Path, descriptor: int, error: type[SlimstateError]) -> None:
        """Raise an error if the open file is not the one that had this identity."""
        now = self._read(descriptor)
        if now != self:
            shorter = " became shorter and" if now.size < self.size else ""
            raise error(f"{quoted(path)}{shorter} changed while it was read: use a model that nobody writes to")


def expand_home(name: str | os.PathLike[str]) -> Path:
    """Return a path with ~ replaced by the home folder; that of an unknown user stays as it is."""
    return Path(os.path.expanduser(name))


def open_regular(path: Path, error: type[SlimstateError]) -> BufferedReader:
    """Open a regular file for reading; refuse a pipe, a device or a folder without waiting for it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as reason:  # ValueError: a zero byte in the name
        message = reason.strerror if isinstance(reason, OSError) else str(reason)
        raise error(f"cannot read {quoted(path)}: {message}") from reason
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"cannot read {quoted(path)}: it is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, error: type[SlimstateError], max_bytes: int) -> bytes:
    """Return the contents of a regular file of limited size."""
    with open_regular(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise error(f"{quoted(path)} must have at most {max_bytes:,} bytes, got {size:,}")
        return file.read(max_bytes)


def check_name(folder: Path, name: object, error: type[SlimstateError]) -> str:
    """Return a name that a file gives if it is that of a file in `folder`; refuse paths and links that lead out."""
    path = PurePosixPath(str(name))
    is_plain = isinstance(name, str) and name.isprintable() and "\\" not in name and str(path) == name
    if not is_plain or name == "." or ".." in path.parts or path.is_absolute():
        raise error(f"{quoted(folder)}: {quoted(name)} is not the name of a file in that folder")
    _check_inside(folder, folder / path, error)
    return str(name)


def _check_inside(folder: Path, path: Path, error: type[SlimstateError]) -> None:
    """Refuse a link that leads out of the folder, unless it leads to the folder's part of the hub's cache."""
    try:
        root, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as reason:  # a link to itself
        raise error(f"cannot read {quoted(path)}: it is a broken link") from reason
    if not any(allowed in target.parents for allowed in (root, *_blob_folders(root))):
        raise error(f"{quoted(path)} is a link that leads out of the model folder; replace it by a copy of the file")


def _blob_folders(root: Path) -> Iterator[Path]:
    """Yield the folders that a snapshot in the hub's cache, `models--owner--name/snapshots/REVISION`, may link to.

    Files of several repositories may lie in one folder beside these, which the hub's client marks.
    """
    for place in (root, *root.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and repository.name.startswith(REPOSITORY_PREFIXES):
            yield repository / "blobs"
            if (repository.parent / "blobs" / SHARED_BLOBS).is_file():
                yield repository.parent / "blobs"


def files_inside(folder: Path, error: type[SlimstateError]) -> Iterator[Path]:
    """Yield every file under a folder, in order, without those of tools; refuse links out and special files."""
    count = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in TOOL_FOLDERS)
        for name in (*names, *(inner for inner in folders if (Path(place) / inner).is_symlink())):
            count += 1
            if count > MAX_FILES:
                raise error(f"{quoted(folder)} is not a model folder: it has more than {MAX_FILES:,} files")
            if not name.isprintable():
                raise error(f"{quoted(folder)} has a file whose name is not printable text: {quoted(name)!a}")
            _check_inside(folder, Path(place) / name, error)
        for name in sorted(names):
            path = Path(place) / name
            if not path.exists() and path.is_symlink():
                raise error(f"cannot read {quoted(path)}: it is a broken link")
            if not path.is_file():
                raise error(f"cannot read {quoted(path)}: it is not a regular file")
            yield path
