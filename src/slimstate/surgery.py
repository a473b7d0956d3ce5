"""Cut parameters by a selection. Knows slots, never architectures.

To cut is to delete the rows of the dropped channels and to keep all other rows in their order. Queries are scaled by
d_k^-0.5, so the rows that stay in a `scaled` slot are multiplied by sqrt(key dim / width), where asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from slimstate.axes import Mixer, Selection


class Cutter:
    """The rows that every parameter keeps under a choice of channels for each mixer."""

    def __init__(self, mixers: Iterable[Mixer], selections: Mapping[int, Selection], *, corrected: bool = True) -> None:
        self._dropped: dict[str, tuple[int, list[Tensor]]] = {}
        self._softened: dict[str, tuple[Tensor, float]] = {}
        for mixer in mixers:
            selection = selections[mixer.layer]
            selection.check(mixer.axis)
            gone = dropped_channels(mixer.axis.width, selection.keep)
            for slot in mixer.axis.slots:
                _, rows = self._dropped.setdefault(mixer.name_of(slot), (slot.dim, []))
                rows.append(mixer.axis.rows(slot, gone).flatten())
                if slot.scaled and corrected:
                    stays = mixer.axis.rows(slot, selection.keep).flatten()
                    factor = math.sqrt(selection.keep.shape[1] / mixer.axis.width)
                    self._softened[mixer.name_of(slot)] = (stays, factor)

    def touches(self, name: str) -> bool:
        return name in self._dropped

    def shape(self, name: str, shape: Iterable[int]) -> list[int]:
        """The shape of parameter `name` after the cut."""
        sizes = list(shape)
        if self.touches(name):
            dim, rows = self._dropped[name]
            sizes[dim] -= sum(len(part) for part in rows)
        return sizes

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """Parameter `name` without the rows of the dropped channels."""
        if not self.touches(name):
            return tensor
        dim, rows = self._dropped[name]
        if name in self._softened:
            kept, factor = self._softened[name]
            softer = tensor.index_select(dim, kept.to(tensor.device)).float() * factor
            tensor = tensor.index_copy(dim, kept.to(tensor.device), softer.to(tensor.dtype))
        stays = torch.ones(tensor.shape[dim], dtype=torch.bool)
        stays[torch.cat(rows)] = False
        return tensor.index_select(dim, stays.nonzero().flatten().to(tensor.device))


def dropped_channels(width: int, keep: Tensor) -> Tensor:
    """The channels [H, D - K] that are not in `keep` [H, K], ascending."""
    stays = torch.zeros(keep.shape[0], width, dtype=torch.bool).scatter_(1, keep, True)
    return (~stays).nonzero()[:, 1].view(keep.shape[0], width - keep.shape[1])


def cut(
    tensors: Mapping[str, Tensor],
    mixers: Iterable[Mixer],
    selections: Mapping[int, Selection],
    *,
    corrected: bool = True,
) -> dict[str, Tensor]:
    """All parameters of a model after the cut."""
    cutter = Cutter(mixers, selections, corrected=corrected)
    return {name: cutter.apply(name, tensor) for name, tensor in tensors.items()}
