"""What can go wrong because of what was asked or given: one line a person can act on.

The command prints such an error as one line and exits with its code; everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

LONGEST_QUOTE, LONGEST_LINE = 80, 480  # characters


class SlimstateError(Exception):
    """The request or its input is at fault, and nothing was written. The message names parameters in backquotes.

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
    """The cut that was asked for cannot be made."""


class OutputError(SlimstateError):
    """The result cannot be written."""


class TrainingError(SlimstateError):
    """Training went astray: the loss is no number any more. The last good checkpoint is kept."""

    code = 3


def quoted(value: object, most: int = LONGEST_QUOTE) -> str:
    """Something that a file or a caller says, as a line may repeat it: in one line, printable, its middle left out."""
    text = str(value)
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[3 - most // 2 :]}"
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def named(path: object) -> str:
    """A path in the same way; more of it, so that it can be found."""
    return quoted(path, 2 * LONGEST_QUOTE)


def reason_of(error: BaseException) -> str:
    """What another library has against something, in a line."""
    lines = str(error).strip().splitlines()
    return quoted(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__, 2 * LONGEST_QUOTE)
