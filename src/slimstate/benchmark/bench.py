"""One benchmark run: from timings to a record that says what it ran on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from slimstate.benchmark import timing
from slimstate.benchmark.options import BenchConfig
from slimstate.families.contract import Library
from slimstate.models.prepare import describe_kernels, prepare_fla
from slimstate.records.base import versions
from slimstate.records.benchmark import BenchRecord, TimedRow, WidthRow
from slimstate.system.progress import SILENT, Reporter

B = TypeVar("B", bound=BenchRecord)
R = TypeVar("R", bound=TimedRow)
W = TypeVar("W", bound=WidthRow)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where a benchmark runs, how many rounds it times, and who reports its progress."""

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
    ) -> Bench:  # fmt: skip
        """Prepare the kernels of a library, unless others are named, and report what will run where."""
        device, dtype = config.run.place, config.run.precision
        if kernels is None:
            prepare_fla()
            kernels = describe_kernels(device, dtype, library)
        reporter.say(f"{timing.device_name(device)}; kernels: {kernels}")
        return cls(name=name, config=config, device=device, dtype=dtype, kernels=kernels, reporter=reporter)

    def time(self, work: timing.Work, warm_up: int = 2) -> timing.Timing:
        return timing.time_work(work, self.device, rounds=self.config.rounds, warm_up=warm_up)

    def time_as_graph(self, work: timing.Work) -> timing.Timing:
        return timing.time_as_graph(work, self.device, rounds=self.config.rounds, say=self.reporter.say)

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
    """Return the rows with speed and memory relative to the widest key dim of their group that was measured."""
    widest: dict[tuple[object, ...], W] = {}
    for row in rows:
        reference = widest.get(row.group)
        if not row.error and (reference is None or row.key_dim > reference.key_dim):
            widest[row.group] = row
    return [row if row.error else row.against(widest[row.group]) for row in rows]
