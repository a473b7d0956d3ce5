"""Time a piece of work repeatedly: with CUDA events on a GPU, with the clock on a CPU."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from slimstate.records.benchmark import TimedRow

R = TypeVar("R", bound=TimedRow)
Work = Callable[[], object]
COPY_BYTES = {"cpu": 2**27, "cuda": 2**31}  # size of the copy that measures a device's bandwidth


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of each round, and the peak memory of the GPU, weights and inputs included.

    `graph` says whether a CUDA graph was timed, and `eager_seconds` is the median of launching kernel by kernel; both
    are None where no graph was attempted.
    """

    seconds: tuple[float, ...]
    peak_bytes: int | None
    graph: bool | None = None
    eager_seconds: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Return the lower and the upper quartile; both are the median of a single round."""
        quartiles = statistics.quantiles(self.seconds, n=4) if len(self.seconds) > 1 else [self.seconds[0]] * 3
        return quartiles[0], quartiles[2]

    def fill(self, row: R) -> R:
        """Return the row with the median, the quartiles, the peak memory, and how it ran."""
        graph: dict[str, Any] = {"graph": self.graph, "eager_seconds": self.eager_seconds}
        row = replace(
            row, seconds=self.median, quartiles=self.quartiles, rounds=len(self.seconds), peak_bytes=self.peak_bytes
        )
        return row if self.graph is None else replace(row, **graph)


def time_work(work: Work, device: torch.device, *, rounds: int, warm_up: int = 2) -> Timing:
    """Run the work `warm_up` times, which compiles and tunes kernels, then time it `rounds` times."""
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        return Timing(seconds=tuple(_clock(work) for _ in range(rounds)), peak_bytes=None)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    seconds = tuple(start.elapsed_time(end) / 1000 for start, end in pairwise(events))
    return Timing(seconds=seconds, peak_bytes=torch.cuda.max_memory_allocated(device))


def time_as_graph(work: Work, device: torch.device, *, rounds: int, say: Callable[[str], None]) -> Timing:
    """Time the work as a CUDA graph, as servers run it: launching kernels one by one can take the host longer than the
    GPU needs for them. Without a graph time the launches; the peak memory is always that of the launches.
    """
    eager = time_work(work, device, rounds=rounds)
    graph = _capture(work, say) if device.type == "cuda" else None
    seconds = eager.seconds if graph is None else time_work(graph.replay, device, rounds=rounds).seconds
    return replace(eager, seconds=seconds, graph=graph is not None, eager_seconds=eager.median)


def _capture(work: Work, say: Callable[[str], None]) -> torch.cuda.CUDAGraph | None:
    """Capture the work as a graph; return None where it cannot be captured or its memory does not suffice."""
    graph = torch.cuda.CUDAGraph()
    try:
        # the outer stream is restored after a failure, which the inner one would survive
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(graph):
            work()
    except RuntimeError as error:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]  # still registered with the graph
        generator.graphsafe_set_state(torch.Generator(device="cuda").graphsafe_get_state())
        say(f"no CUDA graph, timing launch by launch: {str(error).splitlines()[0]}")
        return None
    return graph


def _clock(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of the fastest of ten copies between two large tensors."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_work(lambda: target.copy_(source), device, rounds=10)
    return 2 * source.numel() / min(timing.seconds)


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"
