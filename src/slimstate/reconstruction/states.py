"""Hidden states of many windows, on the device, in host memory or on disk, and the stream of them through a model.

Each process has the states of its windows: every n-th of all, for n processes.
"""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from slimstate.checkpoints.safetensors_io import StoredTensor
from slimstate.models.load import check_embedded
from slimstate.models.memory import DeviceMemory
from slimstate.models.one_layer import OneLayerModel
from slimstate.models.options import parse_limits
from slimstate.system import distributed
from slimstate.system.atomic import writing

SHARE = 0.5  # of what is free on a device or in host memory


def place_for(size: int, device: torch.device, max_memory: str | None) -> str:
    """Return where this many bytes of hidden states go: device, host or disk.

    `max_memory` has limits such as "0=40GiB,cpu=100GiB"; without it, half of what is free may be used.
    """
    limits = parse_limits(max_memory)

    def limit(memory: torch.device, name: str) -> int:
        return int(SHARE * DeviceMemory(memory).free_bytes()) if limits is None else limits.get(name, 0)

    if device.type == "cuda" and size <= limit(device, str(device.index or 0)):
        return "device"
    return "host" if size <= limit(torch.device("cpu"), "cpu") else "disk"


class HiddenStates:
    """States [windows of this process, length, size] in float32, indexed by the numbers of windows."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, place: str, folder: Path) -> None:
        self.device = device
        if place == "disk":
            with writing(folder), tempfile.NamedTemporaryFile(dir=folder, prefix=".states-") as file:
                # the file loses its name when it is mapped, and is removed with the process
                count = torch.Size(shape).numel()
                if hasattr(os, "posix_fallocate"):  # a disk that fills up behind a mapped file would kill the process
                    os.posix_fallocate(file.fileno(), 0, 4 * count)
                else:
                    os.truncate(file.fileno(), 4 * count)
                self._data = torch.from_file(file.name, shared=True, size=count, dtype=torch.float32).view(shape)
        else:
            self._data = torch.empty(shape, device=device if place == "device" else "cpu", dtype=torch.float32)

    @property
    def on_device(self) -> bool:
        return self._data.device.type == self.device.type

    @property
    def bytes(self) -> int:
        return self._data.numel() * 4

    def _rows(self, windows: Tensor) -> Tensor:
        return windows.to(self._data.device) // distributed.count()

    def __getitem__(self, windows: Tensor) -> Tensor:
        return self._data[self._rows(windows)].to(self.device)

    def __setitem__(self, windows: Tensor, states: Tensor) -> None:
        self._data[self._rows(windows)] = states.detach().to(self._data.device, torch.float32)


class Stream:
    """A model, the embeddings of all tokens, and its hidden states before the current layer."""

    states: HiddenStates

    def __init__(self, model: OneLayerModel, weight: StoredTensor, tokens: Tensor) -> None:
        check_embedded(tokens, weight.shape[0])
        distinct, places = tokens.long().unique(return_inverse=True)
        self.model, self.rows = model, model.embed(weight.rows(distinct))
        self.places = places.to(self.rows.device)

    def embedded(self, windows: Tensor) -> Tensor:
        return self.rows[self.places[windows.to(self.rows.device)]]

    def forward(self, layer: int, windows: Tensor) -> Tensor:
        """Return the output of a layer for these windows."""
        return self.model.forward(layer, self.states[windows], self.embedded(windows))
