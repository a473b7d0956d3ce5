"""Verifications: what an engine computes, compared with transformers."""

from __future__ import annotations

from typing import Literal

from slimstate.records.base import Record
from slimstate.records.parts import Model, Origin, Text
from slimstate.records.schema import Count, Positive, Value

Verdict = Literal["agrees", "differs", "refuses"]
MEASURE = "largest difference of a token's log-probability from transformers', in standard deviations of the logits"


class Differences(Value):
    """Differences of log-probabilities, in standard deviations of the logits; None is NaN or infinite.

    `prefill` is over the tokens of a text, `decoding` over tokens that the engine generated with its cache. `same` of
    the `continued` tokens were the first choice of transformers too.
    """

    prefill: float | None
    decoding: float | None
    same: Count
    continued: Count
    deviation: Positive  # of transformers' logits, in nats

    @property
    def largest(self) -> float | None:
        """The larger of both; None where one of them is."""
        return None if self.prefill is None or self.decoding is None else max(self.prefill, self.decoding)


class Outcome(Value):
    """The verdict on one model, with the differences, or with what the engine says where it refuses."""

    model: str
    verdict: Verdict
    words: str | None = None
    reason: str | None = None  # why the engine is known to refuse such models; the words may name another reason
    differences: Differences | None = None

    def __post_init__(self) -> None:
        if (self.verdict == "refuses") != (self.differences is None):
            raise ValueError("there must be differences unless the engine refuses the model")

    def describe(self) -> str:
        """Return the verdict and its reason in one line."""
        if (numbers := self.differences) is None:
            return f"refuses: {self.words}" + (f" (known of such models: {self.reason})" if self.reason else "")
        parts = f"prefill {_number(numbers.prefill)}, decoding {_number(numbers.decoding)}"
        greedy = f"{numbers.same} of {numbers.continued} greedy tokens the same"
        return f"{self.verdict}: largest difference {_number(numbers.largest)} ({parts}), {greedy}"


class VerificationRecord(Record, Model, Origin):
    """An engine compared with transformers, on a model and optionally on the model it was cut from."""

    KIND = "verification"

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
        """What the engine does, in one line, and whether the cut is the cause."""
        version = f" {self.engine_version}" if self.engine_version else ""
        return f"{self.engine}{version} {self.outcome.describe()}{self._cause()}"

    def _cause(self) -> str:
        if self.against is None:
            return ""
        line = f"; {self.against.model} beside it: {self.against.describe()}"
        if self.outcome.verdict == "agrees":
            return line
        if self.against.verdict == "agrees":
            return f"{line}: the cut breaks it there"
        return f"{line}: the engine does so by itself, without the cut"


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.1e}"
