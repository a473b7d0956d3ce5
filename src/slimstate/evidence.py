"""Evidence as a file: safetensors, with the fingerprint of the model and of the tokens it was collected on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from slimstate.axes import Evidence
from slimstate.system.errors import DataError, OutputError
from slimstate.selectors import Need
from slimstate.system.atomic import staged_file

FIELDS: dict[str, tuple[str, ...]] = {
    "gram": ("query_gram", "key_gram"),
    "input": ("input_square",),
    "gradient": ("query_gradient", "key_gradient"),
}
FORMAT = "1"


@dataclass(frozen=True, kw_only=True)
class EvidenceFile:
    """The evidence of every mixer by layer, and the model and the tokens it is of."""

    model: str
    calibration: Mapping[str, Any]
    evidence: Mapping[int, Evidence]

    def missing(self, needs: frozenset[Need]) -> frozenset[Need]:
        """What of `needs` was not collected."""
        held = {name for entry in self.evidence.values() for name, _ in entry.tensors()}
        return frozenset(need for need in needs if need in FIELDS and not set(FIELDS[need]) <= held)

    def extended(self, other: EvidenceFile) -> EvidenceFile:
        joined = {layer: entry.extended(other.evidence[layer]) for layer, entry in self.evidence.items()}
        return EvidenceFile(model=self.model, calibration=self.calibration, evidence=joined)

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        tensors = {
            f"{layer}.{name}": tensor.contiguous()
            for layer, entry in self.evidence.items()
            for name, tensor in entry.tensors()
        }
        tokens = next(iter(self.evidence.values())).tokens
        about = {"model": self.model, "calibration": self.calibration, "tokens": tokens}
        try:
            with staged_file(path) as partial:
                metadata = {"slimstate_evidence": FORMAT, "about": json.dumps(about)}
                safetensors.torch.save_file(tensors, partial, metadata)
        except (OSError, safetensors.SafetensorError) as error:
            raise OutputError(f"cannot write evidence to {path}: {error}") from error

    @classmethod
    def open(cls, path: Path) -> EvidenceFile:
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("slimstate_evidence") != FORMAT:
                    raise DataError(f"{path} is not a slimstate evidence file")
                about = json.loads(metadata["about"])
                layers: dict[int, dict[str, Any]] = {}
                for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    layer, _, name = key.partition(".")
                    layers.setdefault(int(layer), {})[name] = file.get_tensor(key)
        except (OSError, safetensors.SafetensorError, ValueError, KeyError) as error:
            raise DataError(f"{path} is not a slimstate evidence file: {error}") from error
        evidence = {layer: Evidence(tokens=about["tokens"], **entry) for layer, entry in sorted(layers.items())}
        return cls(model=about["model"], calibration=about["calibration"], evidence=evidence)

    def check(self, path: Path, model: str, digest: str | None) -> None:
        """Refuse evidence of another model, or of other tokens where the tokens were given again."""
        if self.model != model:
            seen, here = self.model[:19], model[:19]
            raise DataError(f"{path} is evidence of another model ({seen}…, this one is {here}…): collect it again")
        if digest is not None and self.calibration["digest"] != digest:
            other = self.calibration["data"]
            raise DataError(f"{path} was collected on other tokens ({other}): collect it again or leave out --data")
