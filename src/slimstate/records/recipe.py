"""How far a recipe is: the commands that were run, so that it goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from slimstate.records.base import Record


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """A command without its first word, and how long it took."""

    command: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RecipeRecord(Record):
    KIND: ClassVar[str] = "recipe"

    recipe: str
    title: str
    scale: str
    versions: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[StepDone, ...] = ()
    made: tuple[str, ...] = ()  # what steps have written or begun to write
    out: str

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def has(self, command: str) -> bool:
        return any(step.command == command for step in self.steps)

    def keeping(self, commands: Sequence[str]) -> tuple[StepDone, ...]:
        """The steps that are among these commands."""
        return tuple(step for step in self.steps if step.command in commands)

    def after(self, done: StepDone) -> RecipeRecord:
        """With one more step, or with one that was made again."""
        others = (step for step in self.steps if step.command != done.command)
        return replace(self, steps=(*others, done))
