"""The newest versions that slimstate was tested with; newer ones are allowed, with a warning."""

import functools
import platform
import warnings
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

TESTED = {"torch": "2.13", "transformers": "5.23", "flash-linear-attention": "0.6", "Python": "3.13"}


class UntestedVersion(UserWarning):
    """A package is newer than any that slimstate was tested with."""


@functools.cache
def warn_about_untested() -> None:
    """Warn once about newer packages; called where models are loaded, which such a change would affect."""
    for name, newest in TESTED.items():
        try:
            installed = platform.python_version() if name == "Python" else version(name)
        except PackageNotFoundError:
            continue
        if Version(installed).release[:2] > Version(newest).release[:2]:
            advice = f"the newest that slimstate was tested with; if something fails, try {newest}"
            warnings.warn(f"{name} {installed} is newer than {newest}, {advice}", UntestedVersion, stacklevel=2)
