"""Files that others made: regular ones, in the folder they belong to, the same from the first look to the last.

A pipe or a device in place of a file would be waited for, or read, for ever; a link or a path that leads out of a
folder would bring in what its owner never meant to share.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath

from slimstate.system.errors import SlimstateError, named, quoted

TICK = 0.05  # seconds in which two writes may leave a file with the same times
MOST_ENTRIES = 100_000  # of a model folder
CACHED = ("models--", "datasets--")  # how folders of repositories begin in the hub's cache
SHARED = ".huggingface-shared-blobs"
SKIPPED = (".git", ".cache", "__pycache__")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What tells a file apart from its later self: another file in its place, or other bytes in it.

    The system sets the time of the last change, and nobody can set it back. It is as coarse as a clock tick: of a file
    that was written a moment ago an identity is taken only when the tick is over.
    """

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, descriptor: int) -> Identity:
        found = os.fstat(descriptor)
        fresh = found.st_ctime_ns / 1e9 + TICK - time.time()
        if 0 < fresh <= TICK:  # a clock that was set back is not waited for
            time.sleep(fresh)
            found = os.fstat(descriptor)
        return cls.read(found)

    @classmethod
    def read(cls, found: os.stat_result) -> Identity:
        return cls(
            device=found.st_dev,
            inode=found.st_ino,
            size=found.st_size,
            modified=found.st_mtime_ns,
            changed=found.st_ctime_ns,
        )


def open_regular(path: Path, error: type[SlimstateError]) -> BufferedReader:
    """A regular file, open for reading; what cannot be read, or is a pipe, a device or a folder, is refused at once."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as reason:  # a name with a zero byte in it is a ValueError
        words = reason.strerror if isinstance(reason, OSError) else str(reason)
        raise error(f"cannot read {named(path)}: {words}") from reason
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"cannot read {named(path)}: it is not a regular file")
    return os.fdopen(descriptor, "rb")


@contextmanager
def unchanged(path: Path, identity: Identity, error: type[SlimstateError]) -> Iterator[BufferedReader]:
    """The file that had this identity, open; refused where it is another before or after it is read."""
    with open_regular(path, error) as file:
        _compare(path, identity, file.fileno(), error)
        yield file
        _compare(path, identity, file.fileno(), error)


def _compare(path: Path, identity: Identity, descriptor: int, error: type[SlimstateError]) -> None:
    now = Identity.read(os.fstat(descriptor))
    if now != identity:
        shorter = " became shorter and" if now.size < identity.size else ""
        raise error(f"{named(path)}{shorter} changed while it was read: take a model that nobody writes to")


def read_bytes(path: Path, error: type[SlimstateError], most: int) -> bytes:
    """All of a regular file that is no larger than can be meant."""
    with open_regular(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise error(f"{named(path)} has {size:,} bytes, and such files have at most {most:,}")
        return file.read(most)


def place_inside(folder: Path, name: object, error: type[SlimstateError]) -> str:
    """A name from a file as that of a file in `folder`: neither absolute nor up, and no link leads out."""
    plain = isinstance(name, str) and name.isprintable() and "\\" not in name and str(PurePosixPath(name)) == name
    if not plain or name == "." or ".." in PurePosixPath(str(name)).parts or str(name).startswith("/"):
        raise error(f"{named(folder)}: {quoted(name)} is not the name of a file in that folder")
    check_inside(folder, folder / str(name), error)
    return str(name)


def check_inside(folder: Path, path: Path, error: type[SlimstateError]) -> None:
    """No link leads from the folder to `path`, or one that stays in it or leads to its part of the hub's cache."""
    try:
        root, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as reason:  # a link to itself
        raise error(f"cannot read {named(path)}: its links lead nowhere") from reason
    if root not in target.parents and not any(blobs in target.parents for blobs in _blobs(root)):
        raise error(f"{named(path)} is a link that leads out of the model folder; put a copy of the file in its place")


def _blobs(root: Path) -> Iterator[Path]:
    """Where the hub's cache keeps the files of a snapshot: `models--owner--name/snapshots/REVISION` links to there.

    Files that several repositories have may lie beside these, in one place that its client marks.
    """
    for place in (root, *root.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and repository.name.startswith(CACHED):
            yield repository / "blobs"
            if (repository.parent / "blobs" / SHARED).is_file():
                yield repository.parent / "blobs"


def files_inside(folder: Path, error: type[SlimstateError]) -> Iterator[Path]:
    """Every file under a folder, in order, but for those of tools; each is a regular file that belongs there."""
    found = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in (*names, *(inner for inner in folders if (Path(place) / inner).is_symlink())):
            path = Path(place) / name
            found += 1
            if found > MOST_ENTRIES:
                raise error(f"{named(folder)} holds more than {MOST_ENTRIES:,} files: that is no model folder")
            if not name.isprintable():
                raise error(f"{named(folder)} holds a file whose name is not printable text: {quoted(name)!a}")
            check_inside(folder, path, error)
        for name in sorted(names):
            path = Path(place) / name
            if not path.exists() and path.is_symlink():
                raise error(f"cannot read {named(path)}: its links lead nowhere")
            if not path.is_file():
                raise error(f"cannot read {named(path)}: it is not a regular file")
            yield path
