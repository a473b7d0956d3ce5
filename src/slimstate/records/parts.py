"""What several kinds of records say: which model, which text, how it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimstate.core.stock_class import StockClass
from slimstate.records.provenance import command_line
from slimstate.records.schema import Count, Positive, Whole


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What the config of a cut model says of its last cut."""

    method: str
    key_dim: Whole
    width: Whole
    base_model: str | None = None
    base_fingerprint: str | None = None
    version: str | None = None
    score: str | None = None
    corrected: bool | None = None
    correction: str | None = None
    shared_filters: str | None = None
    history: tuple[Mapping[str, Any], ...] = ()  # the cuts before it
    recovered: tuple[Mapping[str, Any], ...] = ()  # the trainings after it


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training of a model, as its config remembers it."""

    tokens: Count


@dataclass(frozen=True, kw_only=True)
class Done:
    """What was done to a model, as its config says under `slimstate`: a cut, trainings after it, and all before."""

    method: str | None = None
    key_dim: Whole | None = None
    width: Whole | None = None
    base_model: str | None = None
    base_fingerprint: str | None = None
    shared_filters: str | None = None
    trained: tuple[Trained, ...] = ()
    recovered: tuple[Trained, ...] = ()
    history: tuple[Done, ...] = ()

    def __post_init__(self) -> None:
        if self.key_dim is not None and (self.width is None or self.method is None):
            raise ValueError("a cut has a key_dim, a width and a method")


@dataclass(frozen=True, kw_only=True)
class Text:
    """Windows of tokens, and the text they came from."""

    data: str | None = None
    documents: str | None = None  # how those of the text were told apart
    samples: Count | None = None
    length: Count | None = None
    seed: int | None = None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """How well a text is predicted, beside nats per token: per word, per byte, and how many of each there are.

    A word is what stands between white space, as lm-eval counts them; bytes are of UTF-8.
    """

    word_perplexity: Positive | None = None
    bits_per_byte: float | None = None
    tokens: Count | None = None
    words: Count | None = None
    bytes: Count | None = None

    @property
    def counts(self) -> str | None:
        """What it rests on, in words; None in files of 0.1."""
        if self.tokens is None or self.words is None or self.bytes is None:
            return None
        return f"{self.tokens:,} tokens, {self.words:,} words, {self.bytes:,} bytes"


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model a record is of."""

    name: str
    model: str
    fingerprint: str | None = None
    model_type: str | None = None
    key_dim: Count | None = None
    value_dim: Count | None = None
    cut: Cut | None = None
    loader: StockClass | None = None


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a record came about: the config of the run, the software, the kernels, the seed.

    `command` is the config as a command line; records without a config may hold it alone.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    kernels: str | None = None
    seed: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.config:
            object.__setattr__(self, "command", command_line(self.config))


Settings = Mapping[str, Any]  # options by name, as a record keeps them
