"""What can go wrong because of what was asked or given: one line a person can act on.

The command prints such an error as one line and exits with its code; everything else is a bug and keeps its traceback.
"""


class SlimstateError(Exception):
    """The request or its input is at fault, and nothing was written."""

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
