"""What a machine can run out of, in one line, whatever a library raises when it does."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator

from slimstate.system.errors import SlimstateError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OF_A_FULL_DISK = tuple(text for number in NO_ROOM for text in (os.strerror(number), f"(os error {number})"))
OF_A_FULL_MEMORY = (
    "can't allocate memory",  # torch, of the CPU, and so the next
    "not enough memory",
    "cannot allocate memory",
    "failed to map segment",  # the loader of libraries
    "CUDA out of memory",
    "bad_alloc",
    "can't start new thread",
)

LEAST_ADDRESSES = 11 * 2**28  # bytes, 2.75 GiB; with less, some library waits for memory for ever while it is loaded


def check_limits() -> None:
    """Refuse a limit on memory under which not even the libraries can be loaded."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESSES:
        least, given = (f"{size / 2**20:,.0f} MiB" for size in (LEAST_ADDRESSES, limit))
        raise SlimstateError(f"out of memory: a limit of {given} on it (ulimit -v), and {least} are the least")


def no_room(error: BaseException) -> bool:
    """Whether a disk is full, or a file or a quota as large as it may be."""
    return any(
        (isinstance(cause, OSError) and cause.errno in NO_ROOM) or _says(cause, OF_A_FULL_DISK)
        for cause in causes(error)
    )


def no_memory(error: BaseException) -> bool:
    return any(
        isinstance(cause, MemoryError)
        or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
        or _says(cause, OF_A_FULL_MEMORY)
        for cause in causes(error)
    )


def in_words(error: BaseException) -> str | None:
    """What ran out or what the system refused; None of an error that says something else."""
    if no_memory(error):
        return "out of memory: less of it is needed with fewer or shorter windows, or smaller batches"
    if no_room(error):
        return "no space left on a disk, or a file may not grow as large as it would have to"
    if isinstance(error, OSError):
        name = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
        return f"{name}{error.strerror or error}"
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen:
        seen.add(id(here))
        yield here
        here = here.__cause__ or here.__context__


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    said = str(error).lower()
    return any(text.lower() in said for text in texts)
