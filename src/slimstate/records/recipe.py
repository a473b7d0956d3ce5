"""The progress of a recipe: the steps that are done, so that it continues where it was interrupted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from slimstate.records.base import Record
from slimstate.records.schema import Value


class StepResult(Value):
    """The command line of a step, and how long it took."""

    command: str
    seconds: float


class RecipeRecord(Record):
    KIND = "recipe"

    recipe: str
    title: str
    scale: str
    versions: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[StepResult, ...] = ()
    outputs: tuple[str, ...] = ()  # paths that steps have written or begun to write
    out: str

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def has(self, command: str) -> bool:
        return any(step.command == command for step in self.steps)

    def steps_among(self, commands: Sequence[str]) -> tuple[StepResult, ...]:
        """Return the steps that are among these commands."""
        return tuple(step for step in self.steps if step.command in commands)

    def after(self, done: StepResult) -> RecipeRecord:
        """Return the record with one more step, or with one that was repeated."""
        others = (step for step in self.steps if step.command != done.command)
        return replace(self, steps=(*others, done))
