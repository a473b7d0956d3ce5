"""What several kinds of records say: which model, which text, how it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimstate.core.stock_class import StockClass
from slimstate.records.schema import Count, Whole


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
class Text:
    """Windows of tokens, and the text they came from."""

    data: str | None = None
    samples: Count | None = None
    length: Count | None = None
    seed: int | None = None
    digest: str | None = None


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
    """How a record came about: the command, the software, the kernels, the seed."""

    command: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    kernels: str | None = None
    seed: int | None = None
    seconds: float | None = None


Settings = Mapping[str, Any]  # options by name, as a record keeps them
