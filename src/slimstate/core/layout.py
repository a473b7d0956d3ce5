"""Where the key channels of a model live: slots in parameters, axes of channels, mixers, and the calls they make.

A mixer is one linear-attention layer. Its axis is the key/query channel axis: H heads of D channels (the width),
of which K (the key dim) are kept. A slot says which rows of a parameter belong to which channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Rows of one parameter that hold the channels of an axis.

    The row of (head h, channel c) along `dim` is `start + h * head_stride + c`; without a head stride the heads lie
    side by side. The whole pattern stands `copies` times, `copy_stride` rows apart. A `filter` acts on its channel
    alone, as the taps of a depthwise convolution do; other rows make their channel, and rotate with it. Where nothing
    but linear maps lies between these rows and the state, a cut can take the change of the query scale into them: `scaled`.
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
class HookPoint:
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
    of all its linear maps, for adapters. `noncommuting` names what stands between the projections and the state
    and does not commute with a rotation of the channels; where there is nothing, a rotated cut is exact. Without it the channels
    cannot be rotated at all, as where each has a gate of its own. `sharing` says which channels have one filter: those
    of a head, all of them, or by default each its own.
    """

    layer: int
    path: str
    axis: Axis
    query: Slot
    key: Slot
    hook: HookPoint
    input_size: int
    value_heads: int
    value_dim: int
    filters: tuple[tuple[str, Axis], ...] = ()
    projections: tuple[str, ...] = ()
    noncommuting: tuple[str, ...] | None = None
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
