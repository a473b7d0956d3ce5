"""Progress in a notebook: messages, and below them one line that changes."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slimstate.system.progress import Pace, TimedReporter, Update

SECONDS_BETWEEN_UPDATES = 0.5


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, and not an IPython in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookReporter(TimedReporter):
    """Print messages; show work in one line that is cleared when it is done."""

    def say(self, line: str) -> None:
        print(line)

    @contextmanager
    def waiting(self, label: str) -> Iterator[object]:
        from IPython.display import Pretty, display

        handle: Any = display(Pretty(f"{label} …"), display_id=True)
        try:
            yield handle
        finally:
            handle.update(Pretty(""))

    @contextmanager
    def shown(self, pace: Pace) -> Iterator[Update]:
        from IPython.display import Pretty

        shown = 0.0
        with self.waiting(pace.label) as handle:

            def update(done: int, note: str) -> None:
                nonlocal shown
                pace.update(done)
                if time.monotonic() - shown >= SECONDS_BETWEEN_UPDATES:
                    shown = time.monotonic()
                    handle.update(Pretty(pace.line(note)))  # type: ignore[attr-defined]

            yield update
