"""Run one benchmark: compile its kernels ahead, time its cases, and record them with the device and the settings."""

import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field, replace
from typing import Any, TypeVar

import torch

from slimstate.benchmark import timing
from slimstate.benchmark.options import BenchConfig, ModelsBenchConfig
from slimstate.families.contract import Library
from slimstate.models.prepare import describe_kernels, prepare_fla
from slimstate.records.base import versions
from slimstate.records.benchmark import BenchRecord, GraphRow, TimedRow, WidthRow
from slimstate.records.numbers import plural
from slimstate.records.provenance import command_line, run_config
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.value import Value

COMPILE_BATCH = 2  # sequences: enough to compile, and small enough for many processes on one GPU
B = TypeVar("B", bound=BenchRecord)
R = TypeVar("R", bound=TimedRow)
W = TypeVar("W", bound=WidthRow)
G = TypeVar("G", bound=GraphRow)


class Bench(Value):
    """A benchmark: its config, the device, dtype and kernels it runs on, and the reporter of its progress."""

    name: str
    config: BenchConfig
    device: torch.device
    dtype: torch.dtype
    kernels: str
    reporter: Reporter
    start: float = field(default_factory=time.perf_counter)

    @classmethod
    def prepare(
        cls, name: str, config: BenchConfig, kernels: str | None = None, library: Library = "fla", *,
        reporter: Reporter = SILENT,
    ) -> "Bench":  # fmt: skip
        """Prepare the kernels of a library, unless others are named, and report what will run where."""
        device, dtype = config.run.place, config.run.precision
        if kernels is None:
            prepare_fla()
            kernels = describe_kernels(device, dtype, library)
        reporter.say(f"{timing.device_name(device)}; kernels: {kernels}")
        return cls(name=name, config=config, device=device, dtype=dtype, kernels=kernels, reporter=reporter)

    def time(self, row: R, work: timing.Work, warm_up: int = 2) -> R:
        """Return the row with the median time of the work, its quartiles (of one round: the median) and its memory."""
        seconds, peak = timing.time_rounds(work, self.device, rounds=self.config.rounds, warm_up=warm_up)
        quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        return replace(
            row, seconds=statistics.median(seconds), quartiles=(quartiles[0], quartiles[2]), rounds=len(seconds),
            peak_bytes=peak,
        )  # fmt: skip

    def time_as_graph(self, row: G, work: timing.Work) -> G:
        """Return the row with the time of the work as a CUDA graph, or kernel by kernel if it cannot be captured.

        Servers run graphs, because launching kernels one by one can take longer than running them. The peak memory is
        that of the launches.
        """
        eager = self.time(row, work)
        graph = timing.capture(work, self.reporter.say) if self.device.type == "cuda" else None
        row = eager if graph is None else replace(self.time(row, graph.replay), peak_bytes=eager.peak_bytes)
        return replace(row, graph=graph is not None, eager_seconds=eager.seconds)

    def attempt(self, row: R, measure: Callable[[R], R]) -> R:
        """Return the measured row; where the GPU has too little memory, the row with that as its error."""
        try:
            row = measure(row)
        except torch.cuda.OutOfMemoryError:
            row = replace(row, error="out of memory")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.reporter.say(f"{row.label}: {row.error or f'{1000 * row.time:.2f} ms'}")
        return row

    def finish(self, kind: type[B], settings: Mapping[str, Any], rows: Sequence[TimedRow], **facts: Any) -> B:
        """Return the record of this run."""
        return kind(
            bench=self.name,
            device=timing.device_name(self.device),
            dtype=self.config.run.precision_name,
            kernels=self.kernels,
            settings=settings,
            rounds=self.config.rounds,
            rows=tuple(rows),
            versions=versions(),
            seconds=time.perf_counter() - self.start,
            **facts,
        )


def with_ratios(rows: Sequence[W]) -> list[W]:
    """Return the rows with speed and memory relative to the largest state of their group that was measured."""
    measured = sorted((row for row in rows if not row.error), key=lambda row: row.key_dim * (row.value_dim or 1))
    widest = {row.group: row for row in measured}
    return [row if row.error else row.against(widest[row.group]) for row in rows]


def compile_ahead(bench: Bench, options: ModelsBenchConfig, cases: Iterable[tuple[str, int | str]]) -> None:
    """Compile the kernels of each case, a model at some dims, by its command in a process of its own, `jobs` at a time.

    Triton caches compiled kernels on disk. Tuning is left to the process that times: it runs every variant with the GPU
    to itself, and finds the variants compiled, except those of norms that depend on the number of rows.
    """
    if options.jobs and bench.device.type != "cuda":
        bench.reporter.say("no effect on a CPU: `jobs`")
    if bench.device.type != "cuda" or options.jobs < 1:
        return
    threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
    # fla must not cache its choice of variants, which was not timed with the GPU to itself
    environment = os.environ | {"SLIMSTATE_COMPILING": str(threads), "FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}

    def compile_case(case: tuple[str, int | str]) -> subprocess.CompletedProcess[str]:
        config = replace(options, models=(case[0],), key_dims=(case[1],), rounds=1, jobs=0)
        words = shlex.split(command_line(run_config(f"bench {bench.name}", {}, config.to_values())))
        command = [sys.executable, "-m", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    cases = list(cases)
    bench.reporter.say(f"compiling {plural(len(cases), 'width')} in {options.jobs} processes")
    with ThreadPoolExecutor(options.jobs) as pool:
        for (_, dims), process in zip(cases, pool.map(compile_case, cases), strict=True):
            if process.returncode:
                reason = (process.stderr.strip() or "the process was killed").splitlines()[-1]
                bench.reporter.say(f"key dim {dims} will be compiled when it is timed: {reason}")
