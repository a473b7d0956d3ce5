"""The library names parameters, the command names flags: an error that says `key_dim` is told as --key-dim."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

NAMED_OTHERWISE = {"f": "--rrqr-f", "calibration": "--data", "corrected": "--keep-norm-eps"}


def as_flags(message: str, flags: Mapping[str, str]) -> str:
    """The message with every parameter in backquotes that is an option of the command as the flag it is there.

    A parameter of a value, such as `reconstruct.length`, is an option with both names.
    """
    return re.sub(r"`([\w.]+)`", lambda found: flags.get(found[1].replace(".", "_"), found[0]), message)


def flags_of(command: Any) -> dict[str, str]:
    """Every option of a command and of its commands by the name of its parameter."""
    return NAMED_OTHERWISE | dict(_options(command))


def _options(command: Any) -> Iterator[tuple[str, str]]:
    for inner in getattr(command, "commands", {}).values():
        yield from _options(inner)
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield parameter.name, max(parameter.opts, key=len)
