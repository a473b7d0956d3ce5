"""A plan as a record: what `core.plan.Plan` holds, with types for what it holds as bare JSON.

`analyze` copies the plan of a cut model to its records, and says in the copy where that model lies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from slimstate.core.plan import Choice, Plan, Selection
from slimstate.core.stock_class import StockClass
from slimstate.records.base import Record
from slimstate.records.parts import Text
from slimstate.records.schema import FILLED, NAMED, Count, Misfit, Whole, check, read
from slimstate.system.errors import PlanError
from slimstate.system.json_files import JsonObject


@dataclass(frozen=True, kw_only=True)
class UncutModel:
    """The model that a plan is for."""

    source: str
    fingerprint: str | None = None
    loader: StockClass | None = None


@dataclass(frozen=True, kw_only=True)
class EarlierCut:
    """What was cut before, where a model was cut twice."""

    method: str
    width: Whole
    key_dim: Whole


@dataclass(frozen=True, kw_only=True)
class KeptLayer:
    """What the heads of one layer keep, in plain numbers: the channels of each, or None where it is directions.

    `claims` are its certificate: a number for each head by the name of what is claimed.
    """

    layer: int
    heads: int
    channels: tuple[tuple[int, ...], ...] | None
    claims: Mapping[str, tuple[float | None, ...]]


@dataclass(frozen=True, kw_only=True)
class PlanRecord(Record):
    """A plan, and the folder of the model that was cut by it where this is a copy of that model's plan."""

    KIND: ClassVar[str] = "plan"
    FORMAT: ClassVar[int] = Plan.FORMAT

    plan: Plan
    folder: str | None = None

    @property
    def model(self) -> UncutModel:
        return read(UncutModel, self.plan.model, "model")

    @property
    def calibration(self) -> Text | None:
        """None where the weights alone decided, or chance."""
        return read(Text, self.plan.calibration, "calibration") if self.plan.calibration else None

    @property
    def parent(self) -> EarlierCut | None:
        return read(EarlierCut, self.plan.parent, "parent") if self.plan.parent else None

    @cached_property
    def layers(self) -> tuple[KeptLayer, ...]:
        return tuple(_kept(layer, choice) for layer, choice in self.plan.selections.items())

    @property
    def heads(self) -> int:
        """Of all layers."""
        return sum(kept.heads for kept in self.layers)

    @property
    def rotated(self) -> bool:
        """Whether directions are kept, and not channels."""
        return any(not isinstance(choice, Selection) for choice in self.plan.selections.values())

    def same_cut(self, other: PlanRecord) -> bool:
        """Whether both keep the same of every layer."""
        return bool(self.to_json()["layers"] == other.to_json()["layers"])

    def to_json(self) -> JsonObject:
        """The plan itself, and in a copy what it is a copy of."""
        copied = {} if self.folder is None else {"kind": self.KIND, "folder": self.folder}
        return {**copied, **json.loads(self.plan.to_json())}

    @classmethod
    def parsed(cls, data: Mapping[str, object]) -> PlanRecord:
        check(Plan, data, but=("selections",))
        for name, layer in read(WrittenLayers, data).layers.items():
            if (layer.keep is None) == (layer.basis is None):
                raise Misfit(f"layers.{name} keeps neither channels nor directions, or both")
        folder = data.get("folder")
        try:
            plan = Plan.from_json(json.dumps(data))
        except (PlanError, RecursionError) as error:
            raise Misfit(str(error)) from error
        return cls(plan=plan, folder=None if folder is None else read(str, folder, "folder"))

    def contradiction(self) -> str | None:
        """What no plan can be; the properties refuse what is not of their types."""
        plan, _ = self.plan, (self.model, self.calibration, self.parent)
        for name in ("width", "key_dim"):
            if getattr(plan, name) < 1:
                return f"{name} is not a whole number above zero"
        if plan.key_dim > plan.width:
            return f"key_dim {plan.key_dim} is above the width of {plan.width}"
        return next((words for kept in self.layers if (words := _misfit(kept, plan)) is not None), None)


@dataclass(frozen=True, kw_only=True)
class WrittenBasis:
    shape: Annotated[tuple[Whole, ...], FILLED]
    float32: str


@dataclass(frozen=True, kw_only=True)
class WrittenLayer:
    """What a layer keeps as the file has it: channels by head, or directions in base64."""

    keep: Annotated[tuple[Annotated[tuple[Count, ...], FILLED], ...], FILLED] | None = None
    basis: WrittenBasis | None = None


@dataclass(frozen=True, kw_only=True)
class WrittenLayers:
    layers: Annotated[Mapping[str, WrittenLayer], NAMED]


def _kept(layer: int, choice: Choice) -> KeptLayer:
    claims = read(dict[str, tuple[float | None, ...]], choice.certificate, f"layers.{layer}")
    if isinstance(choice, Selection):
        channels = tuple(map(tuple, choice.keep.tolist()))
        return KeptLayer(layer=layer, heads=len(channels), channels=channels, claims=claims)
    return KeptLayer(layer=layer, heads=len(choice.rows), channels=None, claims=claims)


def _misfit(kept: KeptLayer, plan: Plan) -> str | None:
    choice = plan.selections[kept.layer]
    if kept.channels is not None and max(map(max, kept.channels)) >= plan.width:
        return f"layers.{kept.layer} keeps a channel beyond its width of {plan.width}"
    if not isinstance(choice, Selection) and choice.rows.shape[-1] != plan.width:
        return f"layers.{kept.layer} keeps directions of {choice.rows.shape[-1]} channels, not {plan.width}"
    if any(len(claim) != kept.heads for claim in kept.claims.values()):
        return f"layers.{kept.layer} certifies another number of heads than it cuts"
    return None
