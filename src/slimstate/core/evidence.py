"""What calibration sums up for each mixer, in memory and as a file.

The file is safetensors, with the fingerprint of the model and of the tokens it was collected on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
from torch import Tensor

from slimstate.system.atomic import staged_file
from slimstate.system.errors import DataError, OutputError

# what a method may ask for; weights are read, the rest collected
Need = Literal["weight", "gram", "moments", "input", "gradient"]
FIELDS: dict[str, tuple[str, ...]] = {
    "gram": ("query_gram", "key_gram"),
    "moments": ("query_moments", "key_moments"),
    "input": ("input_square",),
    "gradient": ("query_gradient", "key_gradient"),
}
FORMAT = "1"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Sums over calibration tokens for one mixer. Sums merge: across batches, processes and machines.

    query_gram, key_gram [H, D, D]: sums of outer products of the activations, float64. query_moments, key_moments
    [H, D + 1, D + 1]: the same of activations divided by their length, with a one behind each: the last row is their
    sum, and its last entry their number. input_square [input size]: sum of squares of the mixer's input.
    query_gradient, key_gradient [H, D, copies * input size]: gradient of the summed language-model loss by the
    projection weights. What a method does not need is None.
    """

    tokens: int
    query_gram: Tensor | None = None
    key_gram: Tensor | None = None
    query_moments: Tensor | None = None
    key_moments: Tensor | None = None
    input_square: Tensor | None = None
    query_gradient: Tensor | None = None
    key_gradient: Tensor | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                yield item.name, value

    def merged(self, other: Evidence) -> Evidence:
        """The evidence of both sets of tokens."""
        mine, theirs = dict(self.tensors()), dict(other.tensors())
        if mine.keys() != theirs.keys():
            raise DataError(f"evidence of different kinds: {sorted(mine)} and {sorted(theirs)}")
        sums = {name: tensor + theirs[name] for name, tensor in mine.items()}
        return Evidence(tokens=self.tokens + other.tokens, **sums)

    def extended(self, other: Evidence) -> Evidence:
        """This evidence with what `other` adds to it, both from the same tokens."""
        if self.tokens != other.tokens:
            raise DataError(f"evidence of {self.tokens} and {other.tokens} tokens cannot be joined")
        return Evidence(tokens=self.tokens, **{**dict(self.tensors()), **dict(other.tensors())})


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
                layers: dict[int, dict[str, Tensor]] = {}
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
            raise DataError(
                f"{path} was collected on other tokens ({other}): collect it again or leave out `calibration`"
            )
