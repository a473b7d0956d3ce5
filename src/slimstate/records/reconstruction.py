"""Reconstructions: the error of every cut layer before and after."""

from __future__ import annotations

from slimstate.records.base import ModelFolderRecord
from slimstate.records.parts import Model, Origin, Text
from slimstate.records.schema import Count, Value, Whole, to_json
from slimstate.records.training import Teacher
from slimstate.system.json_files import JsonObject

RECONSTRUCTION = "slimstate_reconstruction.json"  # beside the weights of a reconstructed model


class LayerErrors(Value):
    """The squared error of a layer's output, relative to what the layer adds to the residual stream.

    On held-out windows, and on as many that were trained on. The weights are those after `step`; 0 is the cut itself.
    """

    layer: Count
    before: float
    after: float
    held_out_before: float
    held_out_after: float
    step: Count
    seconds: float | None = None


class ReconstructionSettings(Value):
    """The windows of the text, and the steps of Adam over batches of them for every layer."""

    steps: Count
    batch: Whole
    samples: Whole
    length: Whole
    learning_rate: float
    seed: int


class DistillationResult(Value):
    """Nats per token on held-out windows before and after a short distillation of the whole model.

    `taken` is whether it helped; otherwise the weights are those of the reconstruction.
    """

    steps: Whole
    before: float
    after: float
    taken: bool

    def line(self) -> str:
        change = f"{self.before:.4f} to {self.after:.4f} nats per token on held-out windows"
        return f"distilled for {self.steps} steps: {change}{'' if self.taken else '; not taken'}"


class ReconstructionRecord(ModelFolderRecord, Model, Origin):
    """The model is the cut one before the reconstruction; the uncut one where both were one run."""

    KIND = "reconstruction"
    FILE = RECONSTRUCTION
    ENTRIES = "reconstructed"

    teacher: Teacher
    settings: ReconstructionSettings
    calibration: Text
    held_out: Count  # of the windows
    layers: tuple[LayerErrors, ...]
    trained_parameters: Count | None = None
    processes: Whole | None = None
    distillation: DistillationResult | None = None
    out: str | None = None

    @property
    def error_before(self) -> float:
        """The mean error over layers on held-out windows."""
        return sum(layer.held_out_before for layer in self.layers) / max(1, len(self.layers))

    @property
    def error_after(self) -> float:
        return sum(layer.held_out_after for layer in self.layers) / max(1, len(self.layers))

    def headline(self) -> str:
        errors = f"{self.error_before:.4f} to {self.error_after:.4f}"
        return f"reconstructed {self.name}: mean error of {len(self.layers)} layers on held-out windows {errors}"

    def table(self) -> list[dict[str, object]]:
        """Return a row for every layer."""
        return [vars(layer) for layer in self.layers]

    def entry(self) -> JsonObject:
        return {
            "version": self.versions.get("slimstate"),
            "teacher": self.teacher.model,
            "teacher_fingerprint": self.teacher.fingerprint,
            "settings": to_json(self.settings),
            "calibration": to_json(self.calibration),
        }
