"""The newest versions that slimstate was tested with. Newer ones are allowed, and are told of in a warning."""

from __future__ import annotations

import functools
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

TESTED = {"torch": (2, 13), "transformers": (5, 22), "flash-linear-attention": (0, 6)}
PYTHON = (3, 13)


class UntestedVersion(UserWarning):
    """A package is newer than any that slimstate was tested with."""


@functools.cache
def warn_of_untested() -> None:
    """Once, and where models are loaded: there a change of theirs would be felt."""
    for name, newest, found in untested():
        warnings.warn(
            f"{name} {found} is newer than {newest}, the newest that slimstate was tested with; "
            "should something fail, try that",
            UntestedVersion,
            stacklevel=2,
        )


def untested() -> list[tuple[str, str, str]]:
    """The packages that are newer: name, newest tested, and what is installed."""
    found = {name: _numbers(name) for name in TESTED}
    newer = [(name, _told(TESTED[name]), _told(here)) for name, here in found.items() if here[:2] > TESTED[name]]
    if sys.version_info[:2] > PYTHON:
        newer.append(("Python", _told(PYTHON), _told(sys.version_info[:2])))
    return newer


def _numbers(package: str) -> tuple[int, ...]:
    """The first numbers of a version; none where the package is not installed."""
    try:
        parts = version(package).split("+")[0].split(".")
    except PackageNotFoundError:
        return ()
    return tuple(int(part) for part in parts[:2] if part.isdigit())


def _told(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
