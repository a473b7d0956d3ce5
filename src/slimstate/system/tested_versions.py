"""The newest versions that slimstate was tested with; newer ones are allowed, with a warning."""

from __future__ import annotations

import functools
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

TESTED = {"torch": (2, 13), "transformers": (5, 22), "flash-linear-attention": (0, 6), "Python": (3, 13)}


class UntestedVersion(UserWarning):
    """A package is newer than any that slimstate was tested with."""


@functools.cache
def warn_about_untested() -> None:
    """Warn once about newer packages; called where models are loaded, which such a change would affect."""
    for name, newest, installed in untested():
        warnings.warn(
            f"{name} {installed} is newer than {newest}, the newest that slimstate was tested with; "
            f"if something fails, try {newest}",
            UntestedVersion,
            stacklevel=2,
        )


def untested() -> list[tuple[str, str, str]]:
    """Return the packages that are newer: name, newest tested version, installed version."""
    installed = {name: _version(name) for name in TESTED}
    return [
        (name, ".".join(map(str, TESTED[name])), ".".join(map(str, numbers)))
        for name, numbers in installed.items()
        if numbers > TESTED[name]
    ]


def _version(package: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, or none where the package is not installed."""
    if package == "Python":
        return sys.version_info[:2]
    try:
        parts = version(package).split("+")[0].split(".")
    except PackageNotFoundError:
        return ()
    return tuple(int(part) for part in parts[:2] if part.isdigit())
