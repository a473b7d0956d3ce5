"""Measure how fast a device multiplies matrices and the disk is read, to estimate how long a run takes."""

import time

import torch

from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.devices import TOKENS_AT_ONCE
from slimstate.records.cut import DeviceSpeed

EFFICIENCY = {"cuda": 0.5, "cpu": 0.6}  # of a whole pass, compared with its matrix products alone
WITH_GRADIENT = 3.2  # cost of a pass forward and backward, in passes forward
PROBE_BYTES = 2**26


def measure_speed(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """Return the speeds of a matrix product of the size of a pass, and of reading the start of the weights."""
    hidden = checkpoint.mixers[0].input_size
    rows = TOKENS_AT_ONCE[device.type]
    left = torch.ones(rows, hidden, device=device, dtype=dtype)
    right = torch.ones(hidden, 4 * hidden, device=device, dtype=dtype)
    best = min(_seconds(left, right, device) for _ in range(3))
    path = next(iter(checkpoint.files.values())).path
    started = time.perf_counter()
    with path.open("rb") as file:
        count = len(file.read(PROBE_BYTES))
    bytes_per_second = count / (time.perf_counter() - started)
    return DeviceSpeed(flops_per_second=8 * rows * hidden**2 / best, read_bytes_per_second=bytes_per_second)


def _seconds(left: torch.Tensor, right: torch.Tensor, device: torch.device) -> float:
    started = time.perf_counter()
    left @ right
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
