"""Hidden states of many windows, on the device, in host memory or on disk; each process has those of its windows."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slimstate.models.devices import free_bytes
from slimstate.models.options import parse_limits
from slimstate.system.atomic import writing

SHARE = 0.5  # of what is free on a device or in host memory


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Bytes that hidden states may take on the device and in host memory; the rest goes to disk."""

    device: torch.device
    on_device: int
    in_host: int

    @classmethod
    def of(cls, device: torch.device, max_memory: str | None) -> MemoryLimits:
        """Return limits such as "0=40GiB,cpu=100GiB", or a share of the free memory."""
        limits = parse_limits(max_memory)
        if limits is not None:
            on_device = limits.get(str(device.index or 0), 0) if device.type == "cuda" else 0
            return cls(device=device, on_device=on_device, in_host=limits.get("cpu", 0))
        free = int(SHARE * free_bytes(device)) if device.type == "cuda" else 0
        return cls(device=device, on_device=free, in_host=int(SHARE * free_bytes(torch.device("cpu"))))

    def place(self, size: int) -> str:
        """Return where this many bytes go: device, host or disk."""
        if size <= self.on_device:
            return "device"
        return "host" if size <= self.in_host else "disk"


def _allocate(file: int, size: int) -> None:
    """Allocate a file at once: a disk that fills up behind a mapped file would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.truncate(file, size)


class HiddenStates:
    """States [windows, length, size] in float32, indexed by windows."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, place: str, folder: Path) -> None:
        self.device, self.place = device, place
        if place == "disk":
            with writing(folder), tempfile.NamedTemporaryFile(dir=folder, prefix=".states-") as file:
                # the file loses its name when it is mapped, and is removed with the process
                count = torch.Size(shape).numel()
                _allocate(file.fileno(), 4 * count)
                self._data = torch.from_file(file.name, shared=True, size=count, dtype=torch.float32).view(shape)
        else:
            self._data = torch.empty(shape, device=device if place == "device" else "cpu", dtype=torch.float32)

    @property
    def on_device(self) -> bool:
        return self._data.device.type == self.device.type

    @property
    def bytes(self) -> int:
        return self._data.numel() * 4

    def __getitem__(self, windows: Tensor) -> Tensor:
        return self._data[windows.to(self._data.device)].to(self.device)

    def __setitem__(self, windows: Tensor, states: Tensor) -> None:
        self._data[windows.to(self._data.device)] = states.detach().to(self._data.device, torch.float32)
