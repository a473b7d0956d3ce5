"""What the benchmarks share: where the bundled model is, and how a piece of work is timed on any device."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

DEMO = Path(__file__).parent.parent / "demo"


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def peak_memory_kib() -> int:
    """Of this process since it began; getrusage would count the parent it was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
