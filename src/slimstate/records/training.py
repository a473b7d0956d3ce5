"""What a training gave: the recovery of a cut model, or a pre-training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slimstate.records.schema import Count

RECOVERY = "slimstate_recovery.json"  # beside the weights of a recovered model
TRAINING = "slimstate_training.json"  # and of a pre-trained one


@dataclass(frozen=True, kw_only=True)
class Teacher:
    model: str
    fingerprint: str | None = None


@dataclass(frozen=True, kw_only=True)
class CorpusText:
    """The tokens that were trained on, and how many windows of them were held out."""

    data: str | None = None
    length: Count | None = None
    windows: Count | None = None
    held_out: Count | None = None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Nats:
    """Mean nats per token on the same tokens: of the model before and after, the uncut one, and the trained uncut."""

    before: float
    after: float
    uncut: float | None = None
    control: float | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the training was worth; `closed` is the share of the gap to the uncut model, or to the control."""

    text: str | None = None
    tokens: Count
    nats: Nats
    perplexity: Mapping[str, float | None] = field(default_factory=dict)
    closed: Mapping[str, float | None] = field(default_factory=dict)
