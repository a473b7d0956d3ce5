"""A reporter that records the lines it is told to show."""

from __future__ import annotations

import slimstate


class Listener(slimstate.Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)
