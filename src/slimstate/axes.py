"""The values that flow through slimstate; each checks itself once, when it is made.

A mixer is one linear-attention layer. Its axis is the key/query channel axis: H heads of D channels (the width),
of which K (the key dim) are kept. A slot says which rows of a parameter belong to which channel.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor

from slimstate.system.errors import DataError, PlanError


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Rows of one parameter that hold the channels of an axis.

    The row of (head h, channel c) along `dim` is `start + h * head_stride + c`; without a head stride the heads lie
    side by side. The whole pattern stands `copies` times, `copy_stride` rows apart. A `filter` acts on its channel
    alone, as the taps of a depthwise convolution do; other rows make their channel, and turn with it. Where nothing but
    linear maps lies between these rows and the state, a cut can take the change of the query scale into them: `scaled`.
    A parameter `by_head` has heads and channels as its first two dimensions, and its rows are counted through both.
    """

    parameter: str
    dim: int = 0
    start: int = 0
    head_stride: int | None = None
    copies: int = 1
    copy_stride: int = 0
    filter: bool = False
    scaled: bool = False
    by_head: bool = False

    def rows_in(self, shape: Sequence[int]) -> int:
        """How many rows a parameter of this shape has."""
        return shape[0] * shape[1] if self.by_head else shape[self.dim]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """H heads of D channels, and every place in the parameters where a channel lives."""

    heads: int
    width: int
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width < 1:
            raise ValueError(f"an axis of {self.heads} heads of {self.width} channels")
        if not self.slots:
            raise ValueError("an axis without slots: nothing would be cut")

    def rows(self, slot: Slot, channels: Tensor) -> Tensor:
        """The rows of `slot` that hold `channels` [H, n], as [copies, H, n]."""
        stride = self.width if slot.head_stride is None else slot.head_stride
        heads = torch.arange(self.heads).view(1, -1, 1) * stride
        copies = torch.arange(slot.copies).view(-1, 1, 1) * slot.copy_stride
        return slot.start + copies + heads + channels.unsqueeze(0)

    def all_rows(self, slot: Slot) -> Tensor:
        return self.rows(slot, torch.arange(self.width).expand(self.heads, -1))


@dataclass(frozen=True, kw_only=True)
class Tap:
    """Where the queries and keys of a mixer can be seen as they enter the state: after convolution and activation.

    `operators` are names in `module` that the layer calls with the arguments `query` and `key` [B, T, H, D], or with as
    many copies of each head as there are value heads. `step`, where it is another function, takes one token without a
    time axis. Where the layer normalises them itself first, `normaliser` names the function it calls with the queries
    and then with the keys. `companions` are arguments with the channels of the keys that are no keys. `timed` are the
    other arguments with a time axis, `state` and `final` those that take the state and ask for it; it is [B, H, V, K]
    where `value_first` says so. `scaled` operators multiply queries by D^-0.5; `bare` ones give out no state unless
    asked. `kernels` are other functions of `module` that may be compiled for GPUs only, `shortcuts` those that do a
    whole layer and read the weights of linear maps past their adapters. `cache` is what the model calls its cache.
    """

    module: str
    operators: tuple[str, ...]
    query: str = "q"
    key: str = "k"
    step: str | None = None
    normaliser: str | None = None
    companions: tuple[str, ...] = ()
    timed: tuple[str, ...] = ("v", "g", "beta")
    state: str = "initial_state"
    final: str = "output_final_state"
    value_first: bool = False
    scaled: bool = True
    bare: bool = False
    kernels: tuple[str, ...] = ()
    shortcuts: tuple[str, ...] = ()
    cache: str = "past_key_values"


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """One linear-attention layer: its channel axis, the two projections that are scored, and the shape of its state.

    `path` is its place in the running model. Files may name it otherwise (`stored`) and keep in parts what the model
    joins along the first dimension (`joined`: a parameter and its parts); slots are named as in the files. `filters`
    are its convolutions by what they filter, each with an axis of one slot, to look at. `projections` are the names
    of all its linear maps, for adapters. `bends` names what stands between the projections and the state and does not
    commute with a rotation of the channels; where there is nothing, a rotated cut is exact. Without it the channels
    cannot be turned at all, as where each has a gate of its own. `sharing` says which channels have one filter: those
    of a head, all of them, or by default each its own.
    """

    layer: int
    path: str
    axis: Axis
    query: Slot
    key: Slot
    tap: Tap
    input_size: int
    value_heads: int
    value_dim: int
    filters: tuple[tuple[str, Axis], ...] = ()
    projections: tuple[str, ...] = ()
    bends: tuple[str, ...] | None = None
    sharing: str | None = None
    stored: str | None = None
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def convolutions(self) -> tuple[str, ...]:
        """The names of the convolution modules of the running model."""
        whole = {part: name for name, parts in self.joined for part in parts}
        parameters = (axis.slots[0].parameter for _, axis in self.filters)
        return tuple(dict.fromkeys(whole.get(name, name).rpartition(".")[0] for name in parameters))

    @property
    def state_elements(self) -> int:
        return self.value_heads * self.value_dim * self.axis.width

    def name_of(self, slot: Slot) -> str:
        """The tensor of a slot in the files."""
        return f"{self.path if self.stored is None else self.stored}.{slot.parameter}"

    def running_name_of(self, slot: Slot) -> str:
        """The parameter of a slot in the running model; of the projections, which are never joined."""
        return f"{self.path}.{slot.parameter}"

    def stored_parts(self, name: str) -> tuple[str, ...]:
        """The tensors in the files that make up a parameter of the running model; none where it is not the mixer's."""
        if not name.startswith(f"{self.path}."):
            return ()
        parameter = name.removeprefix(f"{self.path}.")
        parts = dict(self.joined).get(parameter, (parameter,))
        return tuple(f"{self.path if self.stored is None else self.stored}.{part}" for part in parts)

    def by_channel(self, slot: Slot, weight: Tensor) -> Tensor:
        """A projection, or its gradient, as [H, D, copies * input size]."""
        rows = self.axis.all_rows(slot).permute(1, 2, 0)
        return weight.index_select(slot.dim, rows.flatten().to(weight.device)).view(*rows.shape[:2], -1)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Sums over calibration tokens for one mixer. Sums merge: across batches, processes and machines.

    query_gram, key_gram [H, D, D]: sums of outer products of the activations, float64. input_square [input size]: sum
    of squares of the mixer's input. query_gradient, key_gradient [H, D, copies * input size]: gradient of the summed
    language-model loss by the projection weights. What a method does not need is None.
    """

    tokens: int
    query_gram: Tensor | None = None
    key_gram: Tensor | None = None
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
        layers = {
            str(layer): {**_written(selection), **selection.certificate} for layer, selection in self.selections.items()
        }
        certificate = {"compression": self.compression, "certificate": self.summary()}
        whole = {"format": self.FORMAT, **plain, **certificate, "layers": layers, "parent": self.parent}
        return json.dumps(whole, indent=1, default=dict)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            data = json.loads(text)
            if data["format"] != cls.FORMAT:
                raise PlanError(f"a plan of format {data['format']}; this version reads format {cls.FORMAT}")
            names = {item.name for item in fields(cls)} - {"selections", "correction"}
            selections = {int(layer): _choice(entry) for layer, entry in data["layers"].items()}
            correction = str(data.get("correction", ""))
            return cls(selections=selections, correction=correction, **{name: data[name] for name in names})
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise PlanError(f"not a slimstate plan: {type(error).__name__} {error}") from error


def _written(choice: Choice) -> dict[str, Any]:
    """Channels as numbers, to be read; directions as the bytes of their float32, which come back as they were."""
    if isinstance(choice, Selection):
        return {"keep": choice.keep.tolist()}
    data = choice.rows.cpu().contiguous().numpy().astype("<f4").tobytes()
    return {"basis": {"shape": list(choice.rows.shape), "float32": base64.b64encode(data).decode()}}


def _choice(entry: dict[str, Any]) -> Choice:
    certificate = {name: values for name, values in entry.items() if name not in ("keep", "basis")}
    if "basis" not in entry:
        return Selection(keep=torch.tensor(entry["keep"], dtype=torch.long), certificate=certificate)
    data = bytearray(base64.b64decode(entry["basis"]["float32"], validate=True))
    rows = torch.frombuffer(data, dtype=torch.float32).view(entry["basis"]["shape"])
    return Basis(rows=rows, certificate=certificate)
