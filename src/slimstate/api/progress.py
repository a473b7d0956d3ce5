"""Whether people want to see progress, and where it is shown: in a terminal, in a notebook, or nowhere."""

from __future__ import annotations

from typing import TypeAlias

from slimstate.system.progress import SILENT, Reporter

Progress: TypeAlias = bool | Reporter


def reporter_of(progress: Progress) -> Reporter:
    """Who shows progress: the one given, a bar in the terminal or the notebook, or nobody."""
    if isinstance(progress, Reporter):
        return progress
    if not progress:
        return SILENT
    from slimstate.system.notebook import NotebookReporter, in_notebook

    if in_notebook():
        return NotebookReporter()
    from slimstate.system.console import TerminalReporter

    return TerminalReporter()
