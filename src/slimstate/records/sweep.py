"""A sweep: what every method would cost at every key dim, and the point it recommends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from slimstate.core.stock_class import StockClass
from slimstate.records.base import Record
from slimstate.records.parts import Origin, Text
from slimstate.records.schema import FILLED, Count, Positive, Whole

UNINFORMED = ("random", "random-rotation")  # methods that look at nothing: keys and queries are the same to them


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """What decides the numbers of a sweep, besides the rows that were asked for."""

    fingerprint: str | None = None
    calibration: Text | None = None
    text: Text | None = None
    f: float | None = None
    seed: int | None = None
    device: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Uncut:
    """The model as it is."""

    key_dim: Count
    state_bytes: Positive
    perplexity: Positive
    rank_utilisation: float
    nats_per_token: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cut: a method, what it judged channels by, a key dim, and what that costs."""

    method: str
    score: str
    compression: float
    key_dim: Count
    state_bytes: Positive
    perplexity: Positive | None = None
    nats_per_token: float | None = None
    rank_utilisation: float | None = None
    nats_over_uncut: float | None = None
    kappa: float | None = None
    kappa_worst: float | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.method, self.score, self.key_dim


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """The smallest state within the loss that was allowed, or the mildest cut; `row` is its place among the rows."""

    row: Count | None = None
    within: bool | None = None
    max_loss: float | None = None
    reason: str | None = None
    command: str | None = None


@dataclass(frozen=True, kw_only=True)
class SweepRecord(Record, Origin):
    KIND: ClassVar[str] = "sweep"

    model: str
    model_type: str | None = None
    loader: StockClass | None = None
    width: Whole
    value_dim: Count | None = None
    settings: SweepSettings = field(default_factory=SweepSettings)
    uncut: Uncut
    rows: Annotated[tuple[Row, ...], FILLED]
    recommended: Recommended | None = None

    def contradiction(self) -> str | None:
        row = None if self.recommended is None else self.recommended.row
        return f"recommended.row {row} is none of its rows" if row is not None and row >= len(self.rows) else None
