"""Cut parameters by a choice of channels or directions, from slots alone: this module knows no architecture.

A selection deletes the rows of the dropped channels and keeps all other rows in their order. A basis T [K, D] first
rotates the D rows of every head into K: the rows that compute the channels become T rows, and filters, which act on one
channel each, become (T o T) filters, the elementwise square: the best approximation by filters of one channel each, and
the same filter if all channels of a head share one. Queries are scaled by d_k^-0.5, so the remaining rows of a slot
that absorbs the query scale are multiplied by sqrt(key dim / width) in a corrected cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from slimstate.core.layout import Axis, Mixer, Slot
from slimstate.core.selection import Basis, Choice, Selection
from slimstate.system.errors import PlanError


class Cutter:
    """Cut every parameter by a choice of channels or directions for each mixer."""

    def __init__(self, mixers: Iterable[Mixer], selections: Mapping[int, Choice], *, corrected: bool = True) -> None:
        self._dropped: dict[str, tuple[Slot, list[Tensor]]] = {}
        self._rotations: dict[str, list[Callable[[Tensor], Tensor]]] = {}
        self._rescaled: dict[str, tuple[Tensor, float]] = {}
        for mixer in mixers:
            choice = selections[mixer.layer]
            check_choice(mixer, choice)
            remaining, factor = remaining_channels(choice), math.sqrt(choice.key_dim / mixer.axis.width)
            dropped = dropped_channels(mixer.axis.width, remaining)
            for slot in mixer.axis.slots:
                name = mixer.name_of(slot)
                _, rows = self._dropped.setdefault(name, (slot, []))
                rows.append(mixer.axis.rows(slot, dropped).flatten())
                if isinstance(choice, Basis):
                    self._rotations.setdefault(name, []).append(partial(rotated, mixer.axis, slot, choice))
                if slot.absorbs_query_scale and corrected:
                    self._rescaled[name] = (mixer.axis.rows(slot, remaining).flatten(), factor)

    def touches(self, name: str) -> bool:
        return name in self._dropped

    def shape(self, name: str, shape: Iterable[int]) -> list[int]:
        """Return the shape of parameter `name` after the cut."""
        sizes = list(shape)
        if self.touches(name):
            slot, rows = self._dropped[name]
            count = sum(len(part) for part in rows)
            sizes[1 if slot.by_head else slot.dim] -= count // sizes[0] if slot.by_head else count
        return sizes

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """Return parameter `name`, rotated if its mixer is, without the rows of the dropped channels."""
        if not self.touches(name):
            return tensor
        for rotate in self._rotations.get(name, ()):
            tensor = rotate(tensor)
        slot, _ = self._dropped[name]
        dim, shape = slot.dim, self.shape(name, tensor.shape)
        tensor = tensor.flatten(0, 1) if slot.by_head else tensor
        if name in self._rescaled:
            queries, factor = self._rescaled[name]
            queries = queries.to(tensor.device)
            scaled = tensor.index_select(dim, queries).float() * factor
            tensor = tensor.index_copy(dim, queries, scaled.to(tensor.dtype))
        remaining = self.remaining_rows(name, tensor.shape[dim])
        return tensor.index_select(dim, remaining.to(tensor.device)).view(shape)

    def remaining_rows(self, name: str, rows: int) -> Tensor:
        """Return which of the rows of parameter `name` remain, ascending; of all its heads where it is by head."""
        mask = torch.ones(rows, dtype=torch.bool)
        mask[torch.cat(self._dropped[name][1])] = False
        return mask.nonzero().flatten()

    def changes_values(self, name: str) -> bool:
        """Return whether parameter `name` is rotated or scaled, too, and not only shortened."""
        return name in self._rotations or name in self._rescaled


def outline(mixers: Sequence[Mixer], key_dim: int) -> Cutter:
    """Return a cutter with the shapes of every cut to this key dim; they do not depend on the channels."""
    first = torch.arange(key_dim)
    return Cutter(mixers, {mixer.layer: Selection(keep=first.expand(mixer.axis.heads, -1)) for mixer in mixers})


def check_choice(mixer: Mixer, choice: Choice) -> None:
    """Check that a choice fits the mixer, and that its channels can be rotated if it rotates them."""
    choice.check(mixer.axis)
    if isinstance(choice, Basis) and mixer.noncommuting is None:
        raise PlanError(f"layer {mixer.layer}: the channels of this architecture cannot be rotated, only chosen")


def rotated(axis: Axis, slot: Slot, basis: Basis, tensor: Tensor) -> Tensor:
    """Return a parameter in the directions of a basis: the first K channels of every head; the others are zero."""
    rows = axis.all_rows(slot).flatten().to(tensor.device)
    rotation = basis.rows.to(tensor.device, torch.float64)
    if slot.depthwise:  # normalised to sum to exactly one, so that a shared filter stays the same bit for bit
        rotation = rotation.square() / rotation.square().sum(-1, keepdim=True)
    moved = (tensor.flatten(0, 1) if slot.by_head else tensor).movedim(slot.dim, 0).clone()
    by_head = moved[rows].double().reshape(slot.copies, axis.heads, axis.width, -1)
    result = torch.zeros_like(by_head)
    result[:, :, : basis.key_dim] = rotation @ by_head
    moved[rows] = result.reshape(len(rows), *moved.shape[1:]).to(tensor.dtype)
    return moved.movedim(0, slot.dim).contiguous().view_as(tensor)


def remaining_channels(choice: Choice) -> Tensor:
    """Return the remaining channels [H, K]: those of a selection, or the first K, where `rotated` puts a basis."""
    if isinstance(choice, Basis):
        return torch.arange(choice.key_dim).expand(choice.rows.shape[0], -1)
    return choice.keep


def dropped_channels(width: int, keep: Tensor) -> Tensor:
    """Return the channels [H, D - K] that are not in `keep` [H, K], ascending."""
    mask = torch.zeros(keep.shape[0], width, dtype=torch.bool).scatter_(1, keep, True)
    return (~mask).nonzero()[:, 1].view(keep.shape[0], width - keep.shape[1])


def cut(
    tensors: Mapping[str, Tensor], mixers: Iterable[Mixer], selections: Mapping[int, Choice], *, corrected: bool = True
) -> dict[str, Tensor]:
    """Return all parameters of a model after the cut."""
    cutter = Cutter(mixers, selections, corrected=corrected)
    return {name: cutter.apply(name, tensor) for name, tensor in tensors.items()}
