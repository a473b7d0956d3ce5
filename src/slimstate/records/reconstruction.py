"""What a reconstruction gave: the error of every cut layer before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slimstate.records.base import ModelFolderRecord
from slimstate.records.parts import Model, Origin, Text
from slimstate.records.schema import Count, Whole, to_json
from slimstate.records.training import Teacher
from slimstate.system.json_files import JsonObject

RECONSTRUCTION = "slimstate_reconstruction.json"  # beside the weights of a reconstructed model


@dataclass(frozen=True, kw_only=True)
class LayerErrors:
    """Of one layer: the squared error behind it, relative to what it adds to the residual stream.

    Before and after, on the windows that were held out and on as many that were trained on; `step` is the one whose
    weights were kept, 0 where those of the cut were.
    """

    layer: Count
    before: float
    after: float
    held_out_before: float
    held_out_after: float
    step: Count
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReconstructionSettings:
    """Windows of the text, and steps of Adam over batches of them for every layer."""

    steps: Count
    batch: Whole
    samples: Whole
    length: Whole
    learning_rate: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Distilled:
    """What a short distillation of the whole model afterwards did to nats per token on the windows held out.

    It was `taken` where it helped; otherwise the weights are those of the reconstruction.
    """

    steps: Whole
    before: float
    after: float
    taken: bool

    def line(self) -> str:
        change = f"{self.before:.4f} to {self.after:.4f} nats per token on windows that were held out"
        return f"distilled for {self.steps} steps: {change}{'' if self.taken else '; not taken'}"


@dataclass(frozen=True, kw_only=True)
class ReconstructionRecord(ModelFolderRecord, Model, Origin):
    """The model is the cut one as it was before, or the uncut one where it was cut and reconstructed at once."""

    KIND: ClassVar[str] = "reconstruction"
    FILE: ClassVar[str] = RECONSTRUCTION
    ENTRIES: ClassVar[str] = "reconstructed"

    teacher: Teacher
    settings: ReconstructionSettings
    calibration: Text
    held_out: Count  # of the windows
    layers: tuple[LayerErrors, ...]
    trained_parameters: Count | None = None
    processes: Whole | None = None
    distillation: Distilled | None = None
    out: str | None = None

    @property
    def error_before(self) -> float:
        """The mean over layers, on windows that were held out."""
        return sum(layer.held_out_before for layer in self.layers) / max(1, len(self.layers))

    @property
    def error_after(self) -> float:
        return sum(layer.held_out_after for layer in self.layers) / max(1, len(self.layers))

    def headline(self) -> str:
        errors = f"{self.error_before:.4f} to {self.error_after:.4f}"
        return f"reconstructed {self.name}: mean error of {len(self.layers)} layers on held-out windows {errors}"

    def table(self) -> list[dict[str, object]]:
        """One row for every layer."""
        return [vars(layer) for layer in self.layers]

    def entry(self) -> JsonObject:
        return {
            "version": self.versions.get("slimstate"),
            "teacher": self.teacher.model,
            "teacher_fingerprint": self.teacher.fingerprint,
            "settings": to_json(self.settings),
            "calibration": to_json(self.calibration),
        }
