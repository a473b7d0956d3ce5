"""Errors that the user can act on, printed as one line. Any other exception is a bug and keeps its traceback."""

import re
from pathlib import Path

MAX_QUOTE, MAX_LINE = 80, 480  # characters


class SlimstateError(Exception):
    """The request or its input is wrong, and nothing was written. Messages name parameters in backquotes.

    Examples:
        >>> try:
        ...     slimstate.prune("model", "slim", key_dim=1000, method="l1")
        ... except slimstate.SlimstateError as error:
        ...     print(error)
    """

    code = 2


class ModelError(SlimstateError):
    """The model folder or hub id is missing, broken, or not of a supported family."""


class DataError(SlimstateError):
    """The text is missing, unreadable or too short, or evidence does not belong to this model or text."""


class PlanError(SlimstateError):
    """The requested options do not fit each other or the model."""


class OutputError(SlimstateError):
    """The result cannot be written."""


class TrainingError(SlimstateError):
    """The loss of a training is not finite any more; the last good checkpoint is kept."""

    code = 3


def quoted(value: object, max_length: int = MAX_QUOTE) -> str:
    """Return text for an error: one printable line, its middle left out if it is long (a path: twice as long)."""
    text = str(value)
    size = 2 * max_length if isinstance(value, Path) else max_length
    if len(text) > size:
        text = f"{text[: size // 2]} … {text[3 - size // 2 :]}"
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def reason_of(error: BaseException) -> str:
    """Return the kind and the first line of another library's exception; it goes on after a colon or a comma."""
    lines = re.sub(r"([:,])\s*\n", r"\1 ", str(error).strip()).splitlines()
    return quoted(": ".join([type(error).__name__, *(" ".join(line.split()) for line in lines[:1])]), 2 * MAX_QUOTE)
