"""Sweeps: what every method costs at every key dim, and which cut is recommended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from slimstate.core.stock_class import StockClass
from slimstate.records.base import Record
from slimstate.records.evaluation import LmEval, TaskData
from slimstate.records.parts import Origin, Text, TextScores
from slimstate.records.reconstruction import ReconstructionSettings
from slimstate.records.schema import IN_MEMORY, NON_EMPTY, Count, Positive, Value, Whole

UNCUT = "uncut"  # the method of rows that keep all channels and store the state in another dtype
UNINFORMED = ("random", "random-rotation")  # methods that use no score


class SweepSettings(Value):
    """What decides the numbers of a sweep."""

    fingerprint: str | None = None
    calibration: Text | None = None
    text: Text | None = None
    f: float | None = None
    seed: int | None = None
    device: str | None = None
    dtype: str | None = None
    keep_norm_eps: bool = False
    tasks: Mapping[str, TaskData] = field(default_factory=dict)  # by name
    limit: Count | None = None
    max_length: Count | None = None
    reconstruct: ReconstructionSettings | None = None  # if cuts were reconstructed before they were measured
    state_every: Whole = 1  # tokens between two roundings of the state


class Uncut(TextScores):
    """The uncut model; its perplexity is per token."""

    key_dim: Count
    state_bytes: Positive
    perplexity: Positive
    rank_utilisation: float
    nats_per_token: float | None = None
    lm_eval: LmEval | None = None


class Row(TextScores):
    """A cut by a method, with a score, to a key dim, and what it costs; its perplexity is per token.

    `state_bytes` is the size of a state in `state_dtype`. The method UNCUT keeps all channels.
    """

    method: str
    score: str
    compression: float
    key_dim: Count
    state_bytes: Positive
    state_dtype: str = "float32"
    perplexity: Positive | None = None
    nats_per_token: float | None = None
    rank_utilisation: float | None = None
    nats_over_uncut: float | None = None
    kappa: float | None = None
    kappa_worst: float | None = None
    lm_eval: LmEval | None = None

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.method, self.score, self.key_dim, self.state_dtype


class Recommendation(Value):
    """The cut with the smallest state within the maximum loss, or with the smallest loss; `row` is its index."""

    row: Count | None = None
    within: bool | None = None
    max_loss: float | None = None
    reason: str | None = None
    command: str | None = None


class SweepRecord(Record, Origin):
    KIND = "sweep"

    model: str
    model_type: str | None = None
    loader: StockClass | None = None
    width: Whole
    value_dim: Count | None = None
    settings: SweepSettings = field(default_factory=SweepSettings)
    uncut: Uncut
    rows: Annotated[tuple[Row, ...], NON_EMPTY]
    recommended: Recommendation | None = None
    out: str | None = field(default=None, metadata=IN_MEMORY, compare=False)

    def headline(self) -> str:
        uncut = self.uncut.perplexity
        lines = [f"{len(self.rows)} cuts of {self.model}; perplexity per token, {uncut:.4g} uncut"]
        if self.recommended is not None and self.recommended.reason is not None:
            lines.append(f"recommended: {self.recommended.reason}")
        return "\n".join(lines)

    def table(self) -> list[dict[str, object]]:
        """Return a row for the uncut model and for every cut."""
        columns = ("key_dim", "perplexity", "word_perplexity", "bits_per_byte", "rank_utilisation")
        uncut = {"method": UNCUT, "score": None, **{name: getattr(self.uncut, name) for name in columns}}
        names = ("method", "score", *columns, "nats_over_uncut")
        return [uncut, *({name: getattr(row, name) for name in names} for row in self.rows)]

    @property
    def state_dtypes(self) -> tuple[str, ...]:
        """The dtypes of states; float32 unless others were measured."""
        return tuple(dict.fromkeys(row.state_dtype for row in self.rows))

    @property
    def front(self) -> tuple[int, ...]:
        """The indices of rows that no other row, nor the uncut model, beats in both bytes and nats per token."""
        known = [(row.state_bytes, row.nats_per_token) for row in self.rows if row.nats_per_token is not None]
        if self.uncut.nats_per_token is not None:
            known.append((self.uncut.state_bytes, self.uncut.nats_per_token))
        return tuple(
            place
            for place, row in enumerate(self.rows)
            if row.nats_per_token is not None
            and not any(
                size <= row.state_bytes
                and nats <= row.nats_per_token
                and (size, nats) != (row.state_bytes, row.nats_per_token)
                for size, nats in known
            )
        )

    def contradiction(self) -> str | None:
        row = None if self.recommended is None else self.recommended.row
        return f"recommended.row {row} is none of the rows" if row is not None and row >= len(self.rows) else None
