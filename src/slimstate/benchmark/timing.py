"""Time a piece of work repeatedly: with CUDA events on a GPU, with the clock on a CPU."""

import platform
import timeit
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

Work = Callable[[], object]
COPY_BYTES = {"cpu": 2**27, "cuda": 2**31}  # size of the copy that measures a device's bandwidth


def time_rounds(work: Work, device: torch.device, *, rounds: int, warm_up: int = 2) -> tuple[list[float], int | None]:
    """Warm up, which compiles and tunes kernels; return the seconds of each round and the peak memory of a GPU."""
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        return timeit.repeat(work, repeat=rounds, number=1), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    seconds = [start.elapsed_time(end) / 1000 for start, end in pairwise(events)]
    return seconds, torch.cuda.max_memory_allocated(device)


def capture(work: Work, say: Callable[[str], None]) -> torch.cuda.CUDAGraph | None:
    """Return the work as a CUDA graph, or None if it cannot be captured or the memory does not suffice."""
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


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of the fastest of ten copies between two large tensors."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds, _ = time_rounds(lambda: target.copy_(source), device, rounds=10)
    return 2 * source.numel() / min(seconds)


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
