"""Choose the device and the precision that a model runs in."""

import psutil
import torch

from slimstate.system import distributed
from slimstate.system.errors import PlanError

TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 16384}  # in a forward pass over many windows
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str | None) -> torch.device:
    """Return the device: by default a GPU where there is one, another one for each process."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise PlanError(f"unknown device {name!r}; there are cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise PlanError("no CUDA device here; use `device` cpu")
    if name == "cuda" and distributed.count_here() > torch.cuda.device_count():
        processes, gpus = distributed.count_here(), torch.cuda.device_count()
        raise PlanError(f"{processes} processes for {gpus} GPUs: start at most one for each GPU, or use `device` cpu")
    is_one_of_many = name == "cuda" and distributed.count() > 1
    return torch.device("cuda", distributed.local_rank()) if is_one_of_many else torch.device(name)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or of the machine."""
    return int(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available)


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Return the precision: by default bfloat16 on a GPU and float32 on a CPU."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise PlanError(f"unknown dtype {name!r}; there are {', '.join(DTYPES)}")
    return DTYPES[name]
