"""A plan: what every mixer keeps, with everything that is needed to repeat or to judge that choice.

There is one format: of the plan beside a cut model, of the plan that a cut repeats, and of the copy that `analyze` puts
among its records, which names the folder of the cut model.
"""

import base64
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta

from slimstate.core.file_names import PLAN
from slimstate.core.selection import Basis, Choice, Selection
from slimstate.core.stock_class import StockClass
from slimstate.records.base import Record
from slimstate.records.parts import Cut, Text
from slimstate.records.schema import IN_MEMORY, NON_EMPTY, Count, ValidationError, Value, Whole, from_json, to_json
from slimstate.system.errors import PlanError, quoted, reason_of
from slimstate.system.json_files import JsonObject, read_json

MAX_PLAN_BYTES = 2**30  # bases of many wide heads take hundreds of MiB
Name = Annotated[str, Meta(max_length=100)]
Channels = Annotated[tuple[Annotated[tuple[Count, ...], NON_EMPTY], ...], NON_EMPTY]
MORE = ("values", "origins")  # of a choice: the value channels, and the heads that its heads are made from
VALUE_FIELDS = ("value_width", "value_dim", "value_method")  # of a plan that cuts values


class SourceModel(Value):
    """The uncut model of a plan."""

    source: str
    fingerprint: str | None = None
    loader: StockClass | None = None


class CutFacts(Value):
    """Fields of a plan that are also in the record of its cut."""

    model_type: Name
    width: Whole
    key_dim: Whole
    value_width: Whole | None = None
    value_dim: Whole | None = None  # None where no values are cut
    value_method: Name | None = None
    method: Name
    score: Name
    corrected: bool  # whether the cut corrects the query scale, which depends on the key dim
    correction: str = ""  # how, or why not
    calibration: Text | None = None  # None for methods that need no text
    versions: Mapping[str, str]


class PlanHeader(Record, CutFacts):
    """All of a plan but what its layers keep; `parent` is the plan of an earlier cut."""

    KIND = "plan"

    seed: int
    options: Mapping[str, Any]
    model: SourceModel
    parent: Mapping[str, Any] | None = None
    folder: str | None = None
    origin: SourceModel | None = None  # another checkpoint of the model, whose channels were chosen


class Plan(PlanHeader):
    """Which channels or directions every mixer keeps; `selections` has them by layer."""

    selections: Mapping[int, Choice] = field(metadata=IN_MEMORY)

    @property
    def cuts_keys(self) -> bool:
        """Whether key channels are removed, and not values alone."""
        return self.value_dim is None or self.key_dim < self.width

    @property
    def state_saved(self) -> float:
        """The share of the state that the cut saves."""
        values = 1.0 if self.value_dim is None or self.value_width is None else self.value_dim / self.value_width
        return 1 - self.key_dim / self.width * values

    @property
    def compression(self) -> float:
        return 1 - self.key_dim / self.width

    @property
    def heads(self) -> int:
        """The number of heads in all layers."""
        return sum(choice.heads for choice in self.selections.values())

    @property
    def rotates(self) -> bool:
        """Whether directions are kept, not channels."""
        return any(isinstance(choice, Basis) for choice in self.selections.values())

    @property
    def channels(self) -> dict[int, Selection]:
        """The layers that keep channels."""
        return {layer: choice for layer, choice in self.selections.items() if isinstance(choice, Selection)}

    @property
    def origins(self) -> dict[int, list[int]]:
        """The layers with heads that are made from others, and the uncut head that each of their heads is made from."""
        pairs = ((layer, choice.origins) for layer, choice in self.selections.items())
        return {layer: origins.tolist() for layer, origins in pairs if origins is not None}

    @property
    def earlier_cut(self) -> Cut | None:
        """The cut before this one, where a model was cut twice."""
        return None if self.parent is None else from_json(Cut, self.parent)

    def summary(self) -> dict[str, float | None]:
        """Return the certificate of the whole model: the worst head, and for counts the sum."""
        claims: dict[str, list[float | None]] = {}
        for choice in self.selections.values():
            for name, values in choice.certificate.items():
                claims.setdefault(name, []).extend(values)
        return {
            name: None if None in values else (sum if name == "swaps" else max)(value or 0.0 for value in values)
            for name, values in claims.items()
        }

    def same_cut(self, other: "Plan") -> bool:
        """Return whether both keep the same in every layer."""
        return bool(self.to_json()["layers"] == other.to_json()["layers"])

    def to_json(self) -> JsonObject:
        layers = {str(layer): choice_to_json(choice) for layer, choice in self.selections.items()}
        header = super().to_json()
        for name in VALUE_FIELDS if self.value_dim is None else ():
            del header[name]
        if self.origin is None:
            del header["origin"]
        return {**header, "compression": self.compression, "certificate": self.summary(), "layers": layers}

    @classmethod
    def parse(cls, data: Mapping[str, object]) -> "Plan":
        stored, selections = dict(vars(from_json(_StoredPlan, data))), {}
        for layer, entry in stored.pop("layers").items():
            try:
                selections[int(layer)] = choice_from_json(entry)
            except (ValueError, ArithmeticError, RuntimeError) as error:
                reason = str(error) if isinstance(error, ValidationError) else reason_of(error)
                raise ValidationError(f"layers.{quoted(layer)}: {reason}") from error
        return cls(**stored, selections=selections)

    def contradiction(self) -> str | None:
        if self.key_dim > self.width:
            return f"key_dim must be at most the width {self.width}, got {self.key_dim}"
        _ = self.earlier_cut
        for layer, choice in self.selections.items():
            if isinstance(choice, Selection) and int(choice.keep.max()) >= self.width:
                return f"layers.{layer} keeps a channel beyond the width {self.width}"
            if isinstance(choice, Basis) and choice.rows.shape[-1] != self.width:
                return f"layers.{layer} keeps directions of {choice.rows.shape[-1]} channels, not {self.width}"
            if choice.values is not None and int(choice.values.max()) >= (self.value_width or 0):
                return f"layers.{layer} keeps a value beyond the width {self.value_width}"
            if choice.origins is not None and not set(choice.origins.tolist()) <= set(range(choice.heads)):
                return f"layers.{layer} has heads from {choice.origins.tolist()}, but only {choice.heads} heads"
            if any(len(claim) != choice.heads for claim in choice.certificate.values()):
                return f"layers.{layer} must certify {choice.heads} heads"
        return None


def read_plan_file(path: Path) -> Plan:
    """Read a plan from a file or from the folder of a cut model."""
    path = path / PLAN if path.is_dir() else path
    try:
        return Plan.from_json(read_json(path, PlanError, MAX_PLAN_BYTES))
    except ValidationError as error:
        raise PlanError(f"{quoted(path)} is not a slimstate plan: {error}") from error


class _StoredPlan(PlanHeader):
    layers: Annotated[Mapping[str, Mapping[str, Any]], NON_EMPTY]


class _StoredBasis(Value):
    shape: Annotated[tuple[Whole, ...], NON_EMPTY]
    float32: str  # base64 of the bytes, so that they come back as they were


class _StoredChoice(Value):
    keep: Channels | None = None
    basis: _StoredBasis | None = None
    values: Channels | None = None
    origins: tuple[Count, ...] | None = None

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.basis is None):
            raise ValueError("a layer must keep either channels (`keep`) or directions (`basis`)")


def choice_to_json(choice: Choice) -> JsonObject:
    """Return what a layer keeps as a plan has it, beside its certificate."""
    more = {name: value.tolist() for name in MORE if (value := getattr(choice, name)) is not None}
    if isinstance(choice, Selection):
        return {"keep": choice.keep.tolist(), **more, **to_json(choice.certificate)}
    data = choice.rows.cpu().contiguous().numpy().astype("<f4").tobytes()
    stored = {"shape": list(choice.rows.shape), "float32": base64.b64encode(data).decode()}
    return {"basis": stored, **more, **to_json(choice.certificate)}


def choice_from_json(entry: Mapping[str, Any]) -> Choice:
    """Return what a layer keeps from its entry in a plan."""
    stored = from_json(_StoredChoice, entry)
    claims = {name: values for name, values in entry.items() if name not in ("keep", "basis", *MORE)}
    certificate = from_json(dict[str, tuple[int | float | None, ...]], claims)
    present = {name: values for name in MORE if (values := getattr(stored, name)) is not None}
    more = {name: torch.tensor(values, dtype=torch.long) for name, values in present.items()}
    if stored.basis is None:
        return Selection(keep=torch.tensor(stored.keep, dtype=torch.long), certificate=certificate, **more)
    data = bytearray(base64.b64decode(stored.basis.float32, validate=True))
    rows = torch.frombuffer(data, dtype=torch.float32).view(stored.basis.shape)
    return Basis(rows=rows, certificate=certificate, **more)
