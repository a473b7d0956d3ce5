"""Trainings: the recovery of a cut model, a pre-training, and the reconstruction of cut layers."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, ClassVar

from slimstate.core.file_names import CONFIG
from slimstate.core.standard_errors import standard_error
from slimstate.records.base import Record
from slimstate.records.evaluation import EvaluationRecord, Measure
from slimstate.records.numbers import fixed, is_none, plural, signed, with_error
from slimstate.records.parts import Model, Origin, ReconstructionSettings, Text, TextSizes
from slimstate.records.provenance import config_file
from slimstate.records.schema import Count, Value, Whole, to_json
from slimstate.system.json_files import JsonObject

MIN_EVAL_TOKENS = 8192  # fewer do not compare models
MARGIN = 0.02  # by which the error at another learning rate must be lower than at the first one to replace it
OVERFIT = 2.0  # from this ratio of the errors on held-out windows and on others, more text is advised


class Teacher(Value):
    model: str
    fingerprint: str | None = None


class Nats(Value):
    """Mean nats per token of the model before and after, of the uncut model, and of the control: uncut and trained."""

    before: float
    after: float
    uncut: float | None = None
    control: float | None = None

    def by_name(self) -> dict[str, float]:
        """Return the values that were measured, by name."""
        return {name: nats for name, nats in vars(self).items() if nats is not None}


class Measurements(TextSizes):
    """Scores before and after a training."""

    text: str | None = None
    tokens: Count
    nats: Nats
    perplexity: Mapping[str, float | None] = field(default_factory=dict)  # per token
    word_perplexity: Mapping[str, float | None] = field(default_factory=dict)
    bits_per_byte: Mapping[str, float | None] = field(default_factory=dict)
    window_nats: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # per token, in each window
    nats_error: Mapping[str, float | None] = field(default_factory=dict)  # standard errors over windows
    gain_error: float | None = None  # of the difference between before and after
    recall: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # associative, with standard errors
    recall_residuals: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of the same sequences by stage
    closed: Mapping[str, float | None] = field(default_factory=dict)  # share of the gap to the uncut model or control

    def recall_text(self, stage: str) -> str:
        """Return the share of names that are recalled at a stage, with its standard error."""
        value, error = self.recall.get(stage, (None, None))
        return with_error(fixed(value, 3), error)

    def recall_difference(self, other: str) -> tuple[float | None, float | None]:
        """Return the recall after the training less that of another stage, and the standard error."""
        if not {"after", other} <= self.recall.keys():
            return None, None
        after, before = (
            Measure(
                group="recall", name=name, label=name, value=self.recall[name][0], more_is_better=True,
                error=self.recall[name][1], residuals=self.recall_residuals.get(name, ()),
            )
            for name in ("after", other)
        )  # fmt: skip
        return self.recall["after"][0] - self.recall[other][0], after.difference_error(before)

    def nats_text(self, stage: str) -> str:
        """Return the nats per token of a stage with their standard error."""
        return with_error(fixed(self.nats.by_name().get(stage), 4), self.nats_error.get(stage))

    @property
    def gain(self) -> str:
        """What the training changed, in nats per token and in recall."""
        nats = signed(self.nats.after - self.nats.before, self.gain_error, " nats per token")
        return f"{nats}, {signed(*self.recall_difference('before'))} in recall" if "before" in self.recall else nats

    @property
    def caution(self) -> str:
        """A sentence on too few tokens, or nothing."""
        count = plural(self.tokens, "held-out token")
        return f"{count} are too few to compare models" if self.tokens < MIN_EVAL_TOKENS else ""

    def difference(self, stage: str, other: str) -> tuple[float | None, float | None]:
        """Return the nats per token of one stage over those of another, and the standard error over windows."""
        nats, windows = self.nats.by_name(), [self.window_nats.get(name, ()) for name in (stage, other)]
        return (nats[stage] - nats[other], standard_error(*windows)) if {stage, other} <= nats.keys() else (None, None)

    def difference_text(self, goal: str) -> str:
        """Return the nats per token after the training over those of the uncut model or the control."""
        return signed(*self.difference("after", goal), " nats per token")

    def closed_share(self, goal: str) -> float | None:
        """Return the share of a gap that was closed, or None where it is none or more than all, or not measured well.

        The gap and its change must be more than two standard errors, which old records do not have.
        """
        share, (gap, error) = self.closed.get(goal), self.difference("before", goal)
        if share is None or gap is None or not 0 < share <= 1 or is_none(gap, error):
            return None
        if self.gain_error is None:
            return None if self.window_nats else share
        return None if is_none(self.nats.after - self.nats.before, self.gain_error) else share

    def gaps(self, titles: Mapping[str, str]) -> Iterator[str]:
        """Yield the share of each gap that was closed, or else the nats per token that remain; then those in recall."""
        for goal in self.closed:
            share = self.closed_share(goal)
            closed = None if share is None else f"it closed {share:.0%} of the gap to {titles[goal]}"
            yield closed or f"beside {titles[goal]} it is at {self.difference_text(goal)}"
            if goal in self.recall:
                yield f"beside {titles[goal]} its associative recall is at {signed(*self.recall_difference(goal))}"


class LogEntry(Value):
    """Means since the entry before, as the Trainer logs them; the loss is cross entropy plus weighted distillation."""

    step: Count
    loss: float
    cross_entropy: float | None = None
    distillation: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    epoch: float | None = None


class AdaptationSettings(Value):
    """What was trained: all weights, or a number of `mixers`, or adapters on `targets` and whole `convolutions`."""

    full: bool
    lora_rank: Count | None = None
    lora_alpha: Count | None = None
    targets: tuple[str, ...] = ()  # last parts of module names, as in `convolutions`
    convolutions: tuple[str, ...] = ()
    unfrozen: tuple[str, ...] = ()  # norms and biases that were trained as well
    modules: Count | None = None
    mixers: Count | None = None


class TrainSettings(Value):
    """Options of a training, None where it does not have them; `top_k` is that of a cached teacher."""

    adaptation: AdaptationSettings
    length: Whole
    batch_size: Whole
    steps: Count | None = None
    lr: float | None = None
    min_lr: float | None = None
    warm_up: float | None = None
    seed: int | None = None
    dtype: str | None = None
    kd_weight: float | None = None
    temperature: float | None = None
    full: bool | None = None
    mixers: bool | None = None
    lora_targets: str | None = None
    lora_rank: Count | None = None
    lora_alpha: Count | None = None
    unfreeze: str | None = None
    top_k: Count | None = None
    second_beta: float | None = None
    weight_decay: float | None = None
    adam_eps: float | None = None


class ModelFolderRecord(Record, Model, Origin):
    """A record in the folder of a trained model, with an entry in its config; `model` is the one before."""

    FILE: ClassVar[str]
    ENTRIES: ClassVar[str]  # the list in the `slimstate` entry of the config

    teacher: Teacher | None = None
    settings: Value
    trained_parameters: Count | None = None
    processes: Whole | None = None
    out: str | None = None

    def entry(self) -> JsonObject:
        """Return the entry of this training in the config of the model."""
        return {
            "version": self.versions.get("slimstate"),
            "teacher": None if self.teacher is None else self.teacher.model,
            "teacher_fingerprint": None if self.teacher is None else self.teacher.fingerprint,
            "settings": to_json(self.settings),
        }

    def files(self) -> dict[str, str]:
        """Return the texts of the files beside the weights: this record, and the config of its run."""
        return {self.FILE: json.dumps(self.to_json(), indent=1) + "\n", CONFIG: config_file(self.config)}

    def config_after(self, config: Mapping[str, Any]) -> JsonObject:
        """Return a model's config with the entry of this record behind earlier ones."""
        earlier = dict(config.get("slimstate") or {})
        return {**config, "slimstate": {**earlier, self.ENTRIES: [*earlier.get(self.ENTRIES, []), self.entry()]}}


class TrainingRunRecord(ModelFolderRecord):
    """What recoveries and pre-trainings have in common."""

    settings: TrainSettings
    corpus: Text | None = None
    tokens: Count
    measured: Measurements
    epochs: float | None = None  # 1 where the text is longer than the training
    tokens_per_second: float | None = None
    log: tuple[LogEntry, ...] = ()

    def headline(self) -> str:
        shares = {name: self.measured.closed_share(name) for name in self.measured.closed}
        closed = "".join(f"; {share:.0%} of the gap to {name} closed" for name, share in shares.items() if share)
        return f"{self.name}: {self.tokens:,} tokens, {self.measured.gain}{closed}"

    def table(self) -> list[dict[str, object]]:
        """Return a row for every entry of the log."""
        return [vars(entry) for entry in self.log]

    def entry(self) -> JsonObject:
        run = {"model": self.model, "fingerprint": self.fingerprint, "tokens": self.tokens}
        return {**super().entry(), **run, "corpus": to_json(self.corpus)}


class RecoveryRecord(TrainingRunRecord):
    """The recovery of a cut model, or its distillation after a reconstruction; a control may have been the teacher."""

    KIND = "recovery"
    FILE = "slimstate_recovery.json"
    ENTRIES = "recovered"

    control_teaches: bool = False
    distilled: bool = False

    def entry(self) -> JsonObject:
        return {**super().entry(), **({"distilled": True} if self.distilled else {})}


class TrainingRecord(TrainingRunRecord):
    """A pre-training; `model` is the config it started from, or the model that was trained further."""

    KIND = "training"
    FILE = "slimstate_training.json"
    ENTRIES = "trained"

    parameters: Count | None = None
    shared_filters: str | None = None


class RateTrial(Value):
    """The error on held-out windows after some steps at a learning rate."""

    learning_rate: float
    steps: Count
    held_out: float

    def __str__(self) -> str:
        return f"{self.learning_rate:g} (error {self.held_out:.4f} after {plural(self.steps, 'step')})"


class LayerErrors(Value):
    """The squared error of a layer's output, relative to what the layer adds to the residual stream."""

    layer: Count
    before: float  # on windows that were trained on
    after: float
    held_out_before: float  # on as many others
    held_out_after: float
    step: Count  # after which the weights are taken; 0: the cut, or with `refit` one with a refitted output projection
    learning_rate: float | None = None
    chosen_rate: float | None = None  # of all layers of its kind, by the `trial` of one of them
    trial: tuple[RateTrial, ...] = ()
    refit: bool = False
    negligible: bool = False  # the error was too small to train
    seconds: float | None = None

    @property
    def improved(self) -> bool:
        return bool(self.step) or self.refit

    @property
    def rates(self) -> str:
        """The learning rate of the weights, where several were tried, and that of other layers of its kind."""
        trials, own, other = ", ".join(map(str, self.trial)), self.learning_rate, self.chosen_rate
        best = "no learning rate helped" if own is None else f"learning rate {own:g} was best"
        margin = f" (another one must be {MARGIN:.0%} better)" if own not in (None, other) else ""
        return f"{best} at layer {self.layer} of {trials}; other layers of its kind start with {other:g}{margin}"


class DistillationResult(Value):
    """Nats per token on held-out windows before and after a short distillation of the whole model."""

    steps: Whole
    before: float
    after: float
    taken: bool  # whether it helped; otherwise the weights are those of the reconstruction

    def line(self) -> str:
        change = f"{self.before:.4f} to {self.after:.4f} nats per token on held-out windows"
        return f"distilled for {plural(self.steps, 'step')}: {change}{'' if self.taken else '; not taken'}"


class ReconstructionRecord(ModelFolderRecord):
    """A reconstruction; `model` is the cut model before it, or the uncut model if one run cut and reconstructed."""

    KIND = "reconstruction"
    FILE = "slimstate_reconstruction.json"
    ENTRIES = "reconstructed"

    teacher: Teacher
    settings: ReconstructionSettings
    calibration: Text
    held_out: Count  # of the windows
    layers: tuple[LayerErrors, ...]
    distillation: DistillationResult | None = None
    evaluation: EvaluationRecord | None = None

    @property
    def error_before(self) -> float:
        """The mean error over layers on held-out windows."""
        return sum(layer.held_out_before for layer in self.layers) / max(1, len(self.layers))

    @property
    def error_after(self) -> float:
        return sum(layer.held_out_after for layer in self.layers) / max(1, len(self.layers))

    @property
    def trainable(self) -> list[LayerErrors]:
        """The layers whose error is large enough to train."""
        return [layer for layer in self.layers if not layer.negligible]

    @property
    def unimproved(self) -> list[int]:
        """The layers that training did not improve, which keep the weights of the cut."""
        return [layer.layer for layer in self.trainable if not layer.improved]

    def headline(self) -> str:
        errors = f"{self.error_before:.4f} to {self.error_after:.4f} on held-out windows"
        return f"reconstructed {self.name}: mean error of {plural(len(self.layers), 'layer')} {errors}"

    def notes(self) -> Iterator[str]:
        """Yield the learning rates, the layers that keep the weights of the cut, and whether more text helps."""
        for layer in self.layers:
            if layer.trial:
                yield layer.rates
        if self.unimproved:
            count = f"{len(self.unimproved)} of {plural(len(self.trainable), 'layer')}"
            yield f"{count} did not improve and keep the weights of the cut: {', '.join(map(str, self.unimproved))}"
        if negligible := [str(layer.layer) for layer in self.layers if layer.negligible]:
            yield f"not trained, because the cut changes them too little: {', '.join(negligible)}"
        after = sum(layer.after for layer in self.layers) / max(1, len(self.layers))
        if len(self.unimproved) < len(self.trainable) and self.error_after > OVERFIT * after:
            yield (
                f"the windows were learnt by heart: the mean error is {after:.4f} on windows that were trained on and"
                f" {self.error_after:.4f} on others; use more windows than {self.settings.samples}, or fewer steps"
            )

    def table(self) -> list[dict[str, object]]:
        """Return a row for every layer."""
        return [{name: value for name, value in vars(layer).items() if name != "trial"} for layer in self.layers]

    def entry(self) -> JsonObject:
        return {**super().entry(), "calibration": to_json(self.calibration)}
