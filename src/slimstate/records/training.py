"""What a training gave: the recovery of a cut model, or a pre-training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from slimstate.records.base import ModelFolderRecord
from slimstate.records.parts import Model, Origin
from slimstate.records.schema import Count, Whole, to_json
from slimstate.system.json_files import JsonObject

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
    documents: str | None = None  # how those of the text were told apart
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

    def known(self) -> dict[str, float]:
        """Those that were measured, by name."""
        return {name: nats for name, nats in vars(self).items() if nats is not None}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the training was worth, in the units of `Predicted`: `perplexity` is per token.

    `closed` is the share of the gap to the uncut model, or to the control.
    """

    text: str | None = None
    tokens: Count
    words: Count | None = None
    bytes: Count | None = None
    nats: Nats
    perplexity: Mapping[str, float | None] = field(default_factory=dict)
    word_perplexity: Mapping[str, float | None] = field(default_factory=dict)
    bits_per_byte: Mapping[str, float | None] = field(default_factory=dict)
    closed: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """What the Trainer logged: means since the entry before. The loss is cross entropy plus weighted distillation."""

    step: Count
    loss: float
    cross_entropy: float | None = None
    distillation: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    epoch: float | None = None


@dataclass(frozen=True, kw_only=True)
class AdaptationSettings:
    """What was trained: all weights, or adapters on `targets` and the `convolutions` whole, by their last names.

    Or so many `mixers` whole. `unfrozen` are norms and biases that were trained as well.
    """

    full: bool
    lora_rank: Count | None = None
    lora_alpha: Count | None = None
    targets: tuple[str, ...] = ()
    convolutions: tuple[str, ...] = ()
    unfrozen: tuple[str, ...] = ()
    modules: Count | None = None
    mixers: Count | None = None


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What decides the result of any training, beside the model and the text."""

    adaptation: AdaptationSettings
    length: Whole
    batch_size: Whole
    steps: Count | None = None
    lr: float | None = None
    min_lr: float | None = None
    warm_up: float | None = None
    seed: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class RecoverySettings(TrainSettings):
    """And of a recovery: the distillation, and which parts are trained. `top_k` is that of a cached teacher."""

    kd_weight: float | None = None
    temperature: float | None = None
    full: bool | None = None
    mixers: bool | None = None
    lora_targets: str | None = None
    lora_rank: Count | None = None
    lora_alpha: Count | None = None
    unfreeze: str | None = None
    top_k: Count | None = None


@dataclass(frozen=True, kw_only=True)
class PretrainSettings(TrainSettings):
    """And of a pre-training: AdamW's second beta and its weight decay."""

    second_beta: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome(Model, Origin):
    """What recoveries and pre-trainings have to say; the model is the one before the training."""

    teacher: Teacher | None = None
    settings: TrainSettings
    corpus: CorpusText | None = None
    tokens: Count
    measured: Measured
    epochs: float | None = None
    trained_parameters: Count | None = None
    tokens_per_second: float | None = None
    log: tuple[LogEntry, ...] = ()
    processes: Whole | None = None
    out: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainedRecord(ModelFolderRecord, Outcome):
    """The record of a training."""

    def headline(self) -> str:
        nats = self.measured.nats
        closed = "".join(
            f"; {share:.0%} of the gap to {name} closed"
            for name, share in self.measured.closed.items()
            if share is not None
        )
        return f"{self.name}: {self.tokens:,} tokens, {nats.before:.4f} to {nats.after:.4f} nats per token{closed}"

    def table(self) -> list[dict[str, object]]:
        """What was logged, a row for every entry."""
        return [vars(entry) for entry in self.log]


@dataclass(frozen=True, kw_only=True)
class RecoveryRecord(TrainedRecord):
    """With `control_teaches` the control, which learnt from the text alone, was the teacher."""

    KIND: ClassVar[str] = "recovery"
    FILE: ClassVar[str] = RECOVERY
    ENTRIES: ClassVar[str] = "recovered"

    settings: RecoverySettings
    control_teaches: bool = False

    def entry(self) -> JsonObject:
        return {
            "version": self.versions.get("slimstate"),
            "model": self.model,
            "fingerprint": self.fingerprint,
            "teacher": None if self.teacher is None else self.teacher.model,
            "teacher_fingerprint": None if self.teacher is None else self.teacher.fingerprint,
            "tokens": self.tokens,
            "settings": to_json(self.settings),
            "corpus": to_json(self.corpus),
        }


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(TrainedRecord):
    """`model` is the config that was trained from, or the model that was trained further."""

    KIND: ClassVar[str] = "training"
    FILE: ClassVar[str] = TRAINING
    ENTRIES: ClassVar[str] = "trained"

    settings: PretrainSettings
    parameters: Count | None = None
    shared_filters: str | None = None

    def entry(self) -> JsonObject:
        return {
            "version": self.versions.get("slimstate"),
            "config": self.model,
            "tokens": self.tokens,
            "settings": to_json(self.settings),
            "corpus": to_json(self.corpus),
        }
