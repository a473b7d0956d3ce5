"""What is kept: channels (`Selection`) or directions (`Basis`) of every mixer, and the `Plan` that can be repeated."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor

from slimstate.core.file_names import PLAN
from slimstate.core.layout import Axis
from slimstate.system.errors import PlanError, quoted, reason_of

__all__ = ["MOST_OF_A_PLAN", "PLAN", "Basis", "Choice", "Plan", "Selection"]

MOST_OF_A_PLAN = 2**30  # bytes of a file: bases of many wide heads take hundreds of MiB


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The channels kept in one mixer: `keep` [H, K], ascending. `certificate` holds one list over heads per claim."""

    keep: Tensor
    certificate: Mapping[str, Sequence[float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.keep.ndim != 2 or self.keep.dtype != torch.long:
            raise ValueError(f"keep must be [heads, kept] of int64, not {list(self.keep.shape)} of {self.keep.dtype}")
        if self.keep.numel() == 0 or bool((self.keep < 0).any()) or bool((self.keep.diff(dim=1) <= 0).any()):
            raise ValueError("keep must be non-empty, non-negative and ascending in every head")

    @property
    def kept(self) -> int:
        return self.keep.shape[1]

    def check(self, axis: Axis) -> None:
        heads, kept = self.keep.shape
        if heads != axis.heads or kept > axis.width or int(self.keep.max()) >= axis.width:
            raise PlanError(
                f"a selection of {heads} x {kept} channels up to {int(self.keep.max())} "
                f"does not fit {axis.heads} heads of {axis.width}"
            )


SEMI_ORTHOGONAL = 1e-4  # how far T T' may be from the identity


@dataclass(frozen=True, kw_only=True)
class Basis:
    """The directions kept in one mixer: `rows` [H, K, D] in float32, orthonormal in every head.

    Channels become `rows @ channels`, queries and keys alike. A selection is the special case whose rows are axes.
    """

    rows: Tensor
    certificate: Mapping[str, Sequence[float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rows.ndim != 3 or self.rows.dtype != torch.float32 or self.rows.numel() == 0:
            shape, dtype = list(self.rows.shape), self.rows.dtype
            raise ValueError(f"a basis must be [heads, kept, width] of float32, not {shape} of {dtype}")
        wide = self.rows.double()
        identity = torch.eye(wide.shape[1], dtype=wide.dtype, device=wide.device)
        off = float((wide @ wide.mT - identity).abs().max())
        if not off <= SEMI_ORTHOGONAL:
            raise ValueError(f"a basis must be semi-orthogonal; its rows are {off:.2g} away from being orthonormal")

    @property
    def kept(self) -> int:
        return self.rows.shape[1]

    def check(self, axis: Axis) -> None:
        heads, kept, width = self.rows.shape
        if heads != axis.heads or width != axis.width or kept > width:
            raise PlanError(
                f"a basis of {heads} x {kept} directions of {width} channels "
                f"does not fit {axis.heads} heads of {axis.width}"
            )


Choice: TypeAlias = Selection | Basis
LONGEST_NAME = 100  # of a method or a model type


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which channels or directions every mixer keeps, and all it takes to repeat or to trust that choice.

    `corrected` says that the cut also makes up for the query scale that comes with the key dim, `correction` how, or
    why not.
    """

    model_type: str
    width: int
    key_dim: int
    method: str
    score: str
    seed: int
    corrected: bool
    options: Mapping[str, Any]
    model: Mapping[str, Any]
    calibration: Mapping[str, Any] | None
    versions: Mapping[str, str]
    selections: Mapping[int, Choice]
    parent: Mapping[str, Any] | None = None
    correction: str = ""

    FORMAT = 1

    @property
    def compression(self) -> float:
        return 1 - self.key_dim / self.width

    @property
    def rotates(self) -> bool:
        """Whether it keeps directions, and not channels."""
        return any(isinstance(choice, Basis) for choice in self.selections.values())

    def summary(self) -> dict[str, float | None]:
        """The certificate of the whole model: the worst head, and for counts the sum."""
        claims: dict[str, list[float | None]] = {}
        for selection in self.selections.values():
            for name, values in selection.certificate.items():
                claims.setdefault(name, []).extend(values)
        return {
            name: None if None in values else (sum if name == "swaps" else max)(value or 0.0 for value in values)
            for name, values in claims.items()
        }

    def to_json(self) -> str:
        plain = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("selections", "parent")
        }
        layers = {str(layer): written_choice(selection) for layer, selection in self.selections.items()}
        certificate = {"compression": self.compression, "certificate": self.summary()}
        whole = {"format": self.FORMAT, **plain, **certificate, "layers": layers, "parent": self.parent}
        return json.dumps(whole, indent=1, default=dict)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            data = json.loads(text)
            if data["format"] != cls.FORMAT:
                raise PlanError(f"a plan of format {quoted(data['format'])}; this version reads format {cls.FORMAT}")
            names = {item.name for item in fields(cls)} - {"selections", "correction"}
            selections = {int(layer): read_choice(entry) for layer, entry in data["layers"].items()}
            correction = str(data.get("correction", ""))
            for name in ("model_type", "method", "score"):
                if not isinstance(data[name], str) or len(data[name]) > LONGEST_NAME:
                    raise PlanError(f"its {name} is no name, but {quoted(data[name])}")
            return cls(selections=selections, correction=correction, **{name: data[name] for name in names})
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise PlanError(f"not a slimstate plan: {reason_of(error)}") from error


def written_choice(choice: Choice) -> dict[str, Any]:
    """What is kept, with its certificate, as a plan has it for a layer."""
    return {**_written(choice), **choice.certificate}


def _written(choice: Choice) -> dict[str, Any]:
    """Channels as numbers, to be read; directions as the bytes of their float32, which come back as they were."""
    if isinstance(choice, Selection):
        return {"keep": choice.keep.tolist()}
    data = choice.rows.cpu().contiguous().numpy().astype("<f4").tobytes()
    return {"basis": {"shape": list(choice.rows.shape), "float32": base64.b64encode(data).decode()}}


def read_choice(entry: dict[str, Any]) -> Choice:
    certificate = {name: values for name, values in entry.items() if name not in ("keep", "basis")}
    if "basis" not in entry:
        return Selection(keep=torch.tensor(entry["keep"], dtype=torch.long), certificate=certificate)
    data = bytearray(base64.b64decode(entry["basis"]["float32"], validate=True))
    rows = torch.frombuffer(data, dtype=torch.float32).view(entry["basis"]["shape"])
    return Basis(rows=rows, certificate=certificate)
