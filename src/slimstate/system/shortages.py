"""Recognise that memory or disk space ran out, whatever a library raises then."""

import errno
import os
import resource
from collections.abc import Iterator

from slimstate.system.errors import SlimstateError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_MESSAGES = tuple(text for number in DISK_ERRORS for text in (os.strerror(number), f"(os error {number})"))
MEMORY_MESSAGES = (
    "can't allocate memory",  # torch on a CPU, as the next two
    "not enough memory",
    "cannot allocate memory",
    "failed to map segment",  # the loader of shared libraries
    "CUDA out of memory",
    "bad_alloc",
    "can't start new thread",
)
MIN_ADDRESS_SPACE = 11 * 2**28  # bytes, 2.75 GiB; with less, some library waits for memory forever while it is imported


def check_limits() -> None:
    """Refuse a limit on memory under which the libraries cannot be imported."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE:
        least, size = (f"{size / 2**20:,.0f} MiB" for size in (MIN_ADDRESS_SPACE, limit))
        raise SlimstateError(f"out of memory: its limit (ulimit -v) must be at least {least}, got {size}")


def is_disk_full(error: BaseException) -> bool:
    """Return whether a disk is full, or a file or a quota has reached its limit."""
    return _has_cause(error, DISK_ERRORS, DISK_MESSAGES)


def describe_shortage(error: BaseException) -> str | None:
    """Return what ran out or what the system refused, or None for any other error."""
    is_memory_error = any(isinstance(cause, MemoryError) for cause in _causes(error))
    if is_memory_error or _has_cause(error, (errno.ENOMEM,), MEMORY_MESSAGES):
        return "out of memory: use fewer or shorter windows, or smaller batches"
    if is_disk_full(error):
        return "no space left on the disk, or a file has reached its size limit"
    if isinstance(error, OSError):
        name = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
        return f"{name}{error.strerror or error}"
    return None


def _has_cause(error: BaseException, numbers: tuple[int, ...], messages: tuple[str, ...]) -> bool:
    return any(
        (isinstance(cause, OSError) and cause.errno in numbers)
        or any(message.lower() in str(cause).lower() for message in messages)
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it came from."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
