"""Cut parameters by a choice of channels or of directions. Knows slots, never architectures.

To cut by a selection is to delete the rows of the dropped channels and to keep all other rows in their order. To cut
by a basis T [K, D] is to rotate the D rows of every head into K first: the rows that make the channels become T rows,
and filters, which act on one channel each, become (T o T) filters, the elementwise square: the best that filters of one
channel each can do, and the same filter where all channels of a head have one. Queries are scaled by d_k^-0.5, so the
rows that stay in a slot that absorbs the query scale are multiplied by sqrt(key dim / width), where asked for.
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
    """What becomes of every parameter under a choice of channels or directions for each mixer."""

    def __init__(self, mixers: Iterable[Mixer], selections: Mapping[int, Choice], *, corrected: bool = True) -> None:
        self._dropped: dict[str, tuple[Slot, list[Tensor]]] = {}
        self._rotations: dict[str, list[Callable[[Tensor], Tensor]]] = {}
        self._softened: dict[str, tuple[Tensor, float]] = {}
        for mixer in mixers:
            choice = selections[mixer.layer]
            check_choice(mixer, choice)
            gone = dropped_channels(mixer.axis.width, kept_channels(choice))
            for slot in mixer.axis.slots:
                name = mixer.name_of(slot)
                _, rows = self._dropped.setdefault(name, (slot, []))
                rows.append(mixer.axis.rows(slot, gone).flatten())
                if isinstance(choice, Basis):
                    self._rotations.setdefault(name, []).append(partial(rotated, mixer.axis, slot, choice))
                if slot.absorbs_query_scale and corrected:
                    stays = mixer.axis.rows(slot, kept_channels(choice)).flatten()
                    self._softened[name] = (stays, math.sqrt(choice.key_dim / mixer.axis.width))

    def touches(self, name: str) -> bool:
        return name in self._dropped

    def shape(self, name: str, shape: Iterable[int]) -> list[int]:
        """The shape of parameter `name` after the cut."""
        sizes = list(shape)
        if self.touches(name):
            slot, rows = self._dropped[name]
            gone = sum(len(part) for part in rows)
            sizes[1 if slot.by_head else slot.dim] -= gone // sizes[0] if slot.by_head else gone
        return sizes

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """Parameter `name`, rotated where its mixer is, without the rows of the dropped channels."""
        if not self.touches(name):
            return tensor
        for rotate in self._rotations.get(name, ()):
            tensor = rotate(tensor)
        slot, rows = self._dropped[name]
        dim, whole = slot.dim, self.shape(name, tensor.shape)
        tensor = tensor.flatten(0, 1) if slot.by_head else tensor
        if name in self._softened:
            kept, factor = self._softened[name]
            softer = tensor.index_select(dim, kept.to(tensor.device)).float() * factor
            tensor = tensor.index_copy(dim, kept.to(tensor.device), softer.to(tensor.dtype))
        stays = torch.ones(tensor.shape[dim], dtype=torch.bool)
        stays[torch.cat(rows)] = False
        return tensor.index_select(dim, stays.nonzero().flatten().to(tensor.device)).view(whole)


def outline(mixers: Sequence[Mixer], key_dim: int) -> Cutter:
    """A cut to this key dim, by whichever channels: all such cuts touch the same tensors and give the same shapes."""
    first = {each.layer: Selection(keep=torch.arange(key_dim).expand(each.axis.heads, -1)) for each in mixers}
    return Cutter(mixers, first)


def check_choice(mixer: Mixer, choice: Choice) -> None:
    """It fits the mixer, and where it rotates the channels, they can be rotated."""
    choice.check(mixer.axis)
    if isinstance(choice, Basis) and mixer.noncommuting is None:
        raise PlanError(f"layer {mixer.layer}: the channels of this architecture cannot be rotated, only chosen")


def rotated(axis: Axis, slot: Slot, basis: Basis, tensor: Tensor) -> Tensor:
    """A parameter in the directions of a basis: they take the first K places of every head, the others become zero."""
    rows = axis.all_rows(slot).flatten().to(tensor.device)
    rotation = basis.rows.to(tensor.device, torch.float64)
    if slot.depthwise:  # weights that sum to one, to the last digit, leave a shared filter bit for bit as it was
        rotation = rotation.square() / rotation.square().sum(-1, keepdim=True)
    moved = (tensor.flatten(0, 1) if slot.by_head else tensor).movedim(slot.dim, 0).clone()
    by_head = moved[rows].double().reshape(slot.copies, axis.heads, axis.width, -1)
    fresh = torch.zeros_like(by_head)
    fresh[:, :, : basis.key_dim] = rotation @ by_head
    moved[rows] = fresh.reshape(len(rows), *moved.shape[1:]).to(tensor.dtype)
    return moved.movedim(0, slot.dim).contiguous().view_as(tensor)


def kept_channels(choice: Choice) -> Tensor:
    """The places [H, K] that stay: those of a selection; of a basis the first K, where `rotated` puts them."""
    if isinstance(choice, Basis):
        return torch.arange(choice.key_dim).expand(choice.rows.shape[0], -1)
    return choice.keep


def dropped_channels(width: int, keep: Tensor) -> Tensor:
    """The channels [H, D - K] that are not in `keep` [H, K], ascending."""
    stays = torch.zeros(keep.shape[0], width, dtype=torch.bool).scatter_(1, keep, True)
    return (~stays).nonzero()[:, 1].view(keep.shape[0], width - keep.shape[1])


def cut(
    tensors: Mapping[str, Tensor],
    mixers: Iterable[Mixer],
    selections: Mapping[int, Choice],
    *,
    corrected: bool = True,
) -> dict[str, Tensor]:
    """All parameters of a model after the cut."""
    cutter = Cutter(mixers, selections, corrected=corrected)
    return {name: cutter.apply(name, tensor) for name, tensor in tensors.items()}
