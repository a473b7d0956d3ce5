"""How long a cut will take and how much memory, before anything is loaded: from headers and a second of measuring.

The device is asked how fast it multiplies matrices of the model's size, the disk how fast it reads. The shares below
turn that into whole passes; they were read off an H200 and a two-core CPU: expect to be wrong by a factor of two.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import BLOCK
from slimstate.checkpoints.writer import WRITERS
from slimstate.core.surgery import outline
from slimstate.models.devices import TOKENS_AT_ONCE, pick_device, pick_dtype
from slimstate.pruning.planning import Calibration
from slimstate.selectors import Selector

EFFICIENCY = {"cuda": 0.5, "cpu": 0.6}  # of a whole pass, beside the matrix products alone
TIMES_FORWARD = {"gram": 1.25, "input": 1.05, "gradient": 3.2}  # of a calibration that needs it
FORWARD_COPIES = {"cuda": 15, "cpu": 30}  # of the hidden states of a pass, alive at once
BACKWARD_COPIES = {"cuda": 18, "cpu": 40}  # of them, kept for each layer until its gradient is taken
INTERPRETER = 0.6 * 2**30  # bytes of Python with torch and fla
PROBED_BYTES = 2**26


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Multiply-adds count two; bytes are of the checkpoint's own files."""

    flops: float
    read_bytes: float


def measure(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Speed:
    """A matrix product of the size of a pass, and reading the start of the weights."""
    hidden = checkpoint.mixers[0].input_size
    rows = TOKENS_AT_ONCE[device.type]
    left = torch.ones(rows, hidden, device=device, dtype=dtype)
    right = torch.ones(hidden, 4 * hidden, device=device, dtype=dtype)
    best = min(_seconds(left, right, device) for _ in range(3))
    path = next(iter(checkpoint.files.values())).path
    started = time.perf_counter()
    with path.open("rb") as file:
        count = len(file.read(PROBED_BYTES))
    return Speed(flops=8 * rows * hidden**2 / best, read_bytes=count / (time.perf_counter() - started))


def _seconds(left: torch.Tensor, right: torch.Tensor, device: torch.device) -> float:
    started = time.perf_counter()
    left @ right
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def estimate(checkpoint: Checkpoint, selector: Selector, calibration: Calibration) -> dict[str, Any]:
    """Seconds and bytes of every stage of a cut."""
    device = pick_device(calibration.device)
    dtype = pick_dtype(calibration.dtype, device)
    speed = measure(checkpoint, device, dtype)
    stored = sum(info.size for info in checkpoint.tensors.values())
    cut = outline(checkpoint.mixers, 1)
    largest = max(info.size for name, info in checkpoint.tensors.items() if cut.touches(name))
    seconds = {"fingerprint and writing": 3 * stored / speed.read_bytes}
    device_bytes: dict[str, float] = {}
    host: dict[str, float] = {"Python and torch": INTERPRETER, "tensors being written": WRITERS * (2 * largest + BLOCK)}
    if selector.calibrated:
        seconds |= _passes(checkpoint, selector, calibration, speed, device)
        seconds["loading"] = stored / speed.read_bytes
        device_bytes = _on_device(checkpoint, selector, device, dtype)
    if device.type == "cpu":
        host, device_bytes = host | device_bytes, {}
    return {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": calibration.samples * calibration.length if selector.calibrated else 0,
        "measured": {"flops_per_second": speed.flops, "read_bytes_per_second": speed.read_bytes},
        "seconds": seconds | {"total": sum(seconds.values())},
        "gpu_bytes": device_bytes | {"total": sum(device_bytes.values())},
        "host_bytes": host | {"total": sum(host.values())},
        "disk_bytes": stored,
    }


def _passes(
    checkpoint: Checkpoint, selector: Selector, calibration: Calibration, speed: Speed, device: torch.device
) -> dict[str, float]:
    tokens = calibration.samples * calibration.length
    forward = 2 * checkpoint.parameters * tokens / (speed.flops * EFFICIENCY[device.type])
    slowest = max(TIMES_FORWARD[need] for need in selector.needs if need in TIMES_FORWARD)
    return {"calibration": slowest * forward}


def _on_device(
    checkpoint: Checkpoint, selector: Selector, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    tokens, hidden = TOKENS_AT_ONCE[device.type], checkpoint.mixers[0].input_size
    states = tokens * hidden * dtype.itemsize
    needed: dict[str, float] = {
        "weights": checkpoint.parameters * dtype.itemsize,
        "a pass": FORWARD_COPIES[device.type] * states,
        "evidence": sum(16 * mixer.axis.heads * mixer.axis.width**2 for mixer in checkpoint.mixers),
    }
    if "gradient" in selector.needs:
        vocabulary = int(checkpoint.config.get("vocab_size", 0))
        layers = int(checkpoint.config.get("num_hidden_layers", len(checkpoint.mixers)))
        needed["a pass"] = BACKWARD_COPIES[device.type] * layers * states + 12 * tokens * vocabulary
        rows = sum(mixer.axis.heads * mixer.axis.width * mixer.input_size for mixer in checkpoint.mixers)
        needed["evidence"] = 8 * rows
    return needed
