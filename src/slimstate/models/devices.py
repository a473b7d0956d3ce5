"""Where a model runs and in which precision: one answer for every verb."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from slimstate.system import distributed
from slimstate.system.errors import PlanError

TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 16384}  # of a forward pass over many windows
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how precisely a model runs.

    Parameters:
        device: "cpu" or "cuda"; by default a GPU where there is one.
        dtype: "float32", "bfloat16" or "float16"; by default bfloat16 on a GPU, float32 on a CPU.

    Examples:
        >>> slimstate.evaluate("slim", "text.txt", run=slimstate.RunOptions(device="cpu"))
    """

    device: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.device is not None:
            pick_device(self.device)
        if self.dtype is not None:
            _check_dtype(self.dtype)

    @property
    def place(self) -> torch.device:
        return pick_device(self.device)

    @property
    def precision(self) -> torch.dtype:
        return pick_dtype(self.dtype, self.place)

    @property
    def precision_name(self) -> str:
        return str(self.precision).removeprefix("torch.")


def pick_device(name: str | None) -> torch.device:
    """`cpu`, `cuda`, or by default the GPU where there is one; each of several processes has its own."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise PlanError(f"unknown device {name!r}; there are cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise PlanError("no CUDA device here; use `device` cpu")
    if name == "cuda" and distributed.count_here() > torch.cuda.device_count():
        here, cards = distributed.count_here(), torch.cuda.device_count()
        raise PlanError(f"{here} processes for {cards} GPUs: start at most one for each GPU, or use `device` cpu")
    return distributed.local_device(name)


def free_bytes(device: torch.device) -> int:
    """Of the memory of a GPU, or of the machine."""
    return int(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available)


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU and float32 on a CPU unless said otherwise."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    _check_dtype(name)
    return DTYPES[name]


def _check_dtype(name: str) -> None:
    if name not in DTYPES:
        raise PlanError(f"unknown dtype {name!r}; there are {', '.join(DTYPES)}")
