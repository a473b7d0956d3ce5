"""What an engine makes of a model, beside what transformers makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from slimstate.records.base import Record
from slimstate.records.parts import Model, Origin, Text
from slimstate.records.schema import Count, Positive

Verdict = Literal["agrees", "differs", "refuses"]
MEASURE = "largest difference of a token's log-probability from transformers', in standard deviations of the logits"


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How far apart log-probabilities are, in standard deviations of the logits.

    `prefill` is over the tokens of a text, `decoding` over those that the engine chose itself, one at a time with its
    cache; None where a number is none. `same` of the `continued` ones were transformers' first choice too.
    """

    prefill: float | None
    decoding: float | None
    same: Count
    continued: Count
    deviation: Positive  # of transformers' logits, in nats

    @property
    def largest(self) -> float | None:
        """Of prefill and decoding; None where one of them is no number."""
        return None if self.prefill is None or self.decoding is None else max(self.prefill, self.decoding)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The verdict on one model, and what it rests on: differences, or what the engine says where it refuses."""

    model: str
    verdict: Verdict
    words: str | None = None
    reason: str | None = None  # a refusal of such models that is known; the words may be about another
    differences: Differences | None = None

    def __post_init__(self) -> None:
        if (self.verdict == "refuses") != (self.differences is None):
            raise ValueError("an engine that does not refuse a model has differences, and one that does has none")

    def describe(self) -> str:
        """The verdict with what it rests on."""
        found = self.differences
        if found is None:
            return f"refuses: {self.words}" + (f" (known of such models: {self.reason})" if self.reason else "")
        parts = f"prefill {_number(found.prefill)}, decoding {_number(found.decoding)}"
        greedy = f"{found.same} of {found.continued} greedy tokens the same"
        return f"{self.verdict}: largest difference {_number(found.largest)} ({parts}), {greedy}"


@dataclass(frozen=True, kw_only=True)
class VerificationRecord(Record, Model, Origin):
    """An engine's log-probabilities beside transformers', of a model and perhaps of the one it was cut from."""

    KIND: ClassVar[str] = "verification"

    engine: str
    engine_version: str | None = None
    text: Text | None = None
    dtype: str
    tolerance: Positive
    measure: str = MEASURE
    outcome: Outcome
    against: Outcome | None = None

    @property
    def verdict(self) -> str:
        """In a line: what the engine does, and whether it does so by itself or because of the cut."""
        version = f" {self.engine_version}" if self.engine_version else ""
        return f"{self.engine}{version} {self.outcome.describe()}{self._cause()}"

    def _cause(self) -> str:
        if self.against is None:
            return ""
        theirs = self.against
        told = f"; {theirs.model} beside it: {theirs.describe()}"
        if self.outcome.verdict == "agrees":
            return told
        if theirs.verdict == "agrees":
            return f"{told}: the cut breaks it there"
        return f"{told}: the engine does so by itself, without the cut"


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.1e}"
