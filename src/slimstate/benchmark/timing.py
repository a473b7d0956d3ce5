"""Time a piece of work again and again: CUDA events on a GPU, the clock on a CPU."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch

from slimstate.records.benchmark import GraphRow, TimedRow

R = TypeVar("R", bound=TimedRow)
G = TypeVar("G", bound=GraphRow)
COPIED = {"cpu": 2**27, "cuda": 2**31}  # bytes of the copy that measures a device's bandwidth


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of each round, and the most memory that was in use on the GPU, weights and inputs included."""

    seconds: tuple[float, ...]
    peak_bytes: int | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper; one round has no spread."""
        quartiles = statistics.quantiles(self.seconds, n=4) if len(self.seconds) > 1 else [self.seconds[0]] * 3
        return quartiles[0], quartiles[2]

    def fill(self, row: R) -> R:
        """The row with the median, the quartiles as its spread, and the peak."""
        return replace(
            row, seconds=self.median, quartiles=self.quartiles, rounds=len(self.seconds), peak_bytes=self.peak_bytes
        )


@dataclass(frozen=True, kw_only=True)
class GraphTiming:
    """Work timed as a CUDA graph, where one could be made, and launched kernel by kernel."""

    timing: Timing
    graph: bool
    eager_seconds: float

    def fill(self, row: G) -> G:
        return replace(self.timing.fill(row), graph=self.graph, eager_seconds=self.eager_seconds)


def timed(work: Callable[[], object], device: torch.device, *, rounds: int, warm_up: int = 2) -> Timing:
    """Do the work `warm_up` times unseen, in which kernels are compiled and tuned, then `rounds` times by the clock."""
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        return Timing(seconds=tuple(_clocked(work) for _ in range(rounds)), peak_bytes=None)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    seconds = tuple(start.elapsed_time(end) / 1000 for start, end in pairwise(marks))
    return Timing(seconds=seconds, peak_bytes=torch.cuda.max_memory_allocated(device))


def timed_as_graph(
    work: Callable[[], object], device: torch.device, *, rounds: int, say: Callable[[str], None]
) -> GraphTiming:
    """The work as a CUDA graph, which is how servers run it: launching its kernels one by one can take the host longer
    than they take the GPU. Launched one by one where it cannot be; the peak is always that. Also says which it was.
    """
    eager = timed(work, device, rounds=rounds)
    graph = _captured(work, say) if device.type == "cuda" else None
    seconds = eager.seconds if graph is None else timed(graph.replay, device, rounds=rounds).seconds
    timing = Timing(seconds=seconds, peak_bytes=eager.peak_bytes)
    return GraphTiming(timing=timing, graph=graph is not None, eager_seconds=eager.median)


def _captured(work: Callable[[], object], say: Callable[[str], None]) -> torch.cuda.CUDAGraph | None:
    """A graph whose every replay reads what the work reads now. None where the work cannot be one, or has no room to
    keep all that it makes.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with (
            torch.cuda.stream(torch.cuda.Stream()),
            torch.cuda.graph(graph),
        ):  # a failure would leave the inner stream on
            work()
    except RuntimeError as error:
        random = torch.cuda.default_generators[torch.cuda.current_device()]  # and numbers being drawn for the graph
        random.graphsafe_set_state(torch.Generator(device="cuda").graphsafe_get_state())
        say(f"timed launch by launch, no CUDA graph can be made: {str(error).splitlines()[0]}")
        return None
    return graph


def _clocked(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of the fastest of ten copies between two large tensors."""
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = timed(lambda: target.copy_(source), device, rounds=10)
    return 2 * source.numel() / min(timing.seconds)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"
