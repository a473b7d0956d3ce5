"""One benchmark under way: from timings to a record that says what it ran on and the command that runs it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from slimstate.benchmark.timing import device_name
from slimstate.families.contract import Library
from slimstate.models.options import RunOptions
from slimstate.models.prepare import describe_kernels, prepare_fla
from slimstate.records.base import versions
from slimstate.records.benchmark import BenchRecord, TimedRow, WidthRow
from slimstate.records.ownership import check_drawn, check_record
from slimstate.records.provenance import run_config
from slimstate.records.schema import written
from slimstate.system.atomic import check_place, staged_files, write_text
from slimstate.system.errors import PlanError
from slimstate.system.progress import SILENT, Reporter

B = TypeVar("B", bound=BenchRecord)
R = TypeVar("R", bound=TimedRow)
W = TypeVar("W", bound=WidthRow)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """How often to time.

    Parameters:
        rounds: timings of each.
        jobs: processes that compile the kernels of all widths on a GPU, before they are timed in turn.

    Examples:
        >>> slimstate.bench_mixer(options=slimstate.BenchOptions(rounds=5))
    """

    rounds: int = 20
    jobs: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise PlanError(f"`rounds` {self.rounds}: at least one is needed")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where a benchmark runs, how often it times, and where its record goes."""

    verb: str
    options: BenchOptions
    run: RunOptions
    device: torch.device
    dtype: torch.dtype
    kernels: str
    out: Path | None
    reporter: Reporter
    started: float

    @classmethod
    def begin(
        cls,
        verb: str,
        options: BenchOptions,
        run: RunOptions | None = None,
        *,
        out: str | Path | None = None,
        reporter: Reporter = SILENT,
        library: Library = "fla",
        kernels: str | None = None,
    ) -> Bench:
        """With `kernels` it is of those, which need no library."""
        run = run or RunOptions()
        folder = None if out is None else Path(out)
        if folder is not None:
            import slimstate.report.plots  # noqa: F401  refuses now, not after the work, where matplotlib is missing

            check_place(folder, folder=True)
            check_record(folder / f"bench-{verb}.json")
            check_drawn(folder, [f"bench-{verb}.*"], beside=f"bench-{verb}.json")
        device, dtype = run.place, run.precision
        if kernels is None:
            prepare_fla()
            kernels = describe_kernels(device, dtype, library)
        reporter.say(f"{device_name(device)}; kernels: {kernels}")
        return cls(
            verb=verb, options=options, run=run, device=device, dtype=dtype, kernels=kernels, out=folder,
            reporter=reporter, started=time.perf_counter(),
        )  # fmt: skip

    def attempt(self, row: R, measure: Callable[[R], R]) -> R:
        """The row with what was measured, or with why nothing was: a GPU that is full is an answer too."""
        try:
            row = measure(row)
        except torch.cuda.OutOfMemoryError:
            row = replace(row, error="out of memory")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.reporter.say(f"{row.label}: {row.error or f'{1000 * row.time:.2f} ms'}")
        return row

    def finish(
        self,
        kind: type[B],
        settings: object,
        rows: Sequence[TimedRow],
        asked: tuple[str, Mapping[str, object]] | None = None,
        **facts: Any,
    ) -> B:
        """The record, written with its tables and its figure where a folder was given.

        `asked` are the verb and the options that do it again, where they are not the benchmark's name and settings.
        """
        verb, given = (self.verb, written(settings)) if asked is None else asked
        options = {**given, "rounds": self.options.rounds, "device": self.device.type}
        record = kind(
            bench=self.verb,
            device=device_name(self.device),
            dtype=self.run.precision_name,
            kernels=self.kernels,
            settings=settings,
            rounds=self.options.rounds,
            rows=tuple(rows),
            config=run_config(f"bench {verb}", {}, {**options, "dtype": self.run.dtype, "out": self.out}),
            versions=versions(),
            seconds=time.perf_counter() - self.started,
            **facts,
        )
        if self.out is not None:
            with staged_files(self.out) as place:
                _write(record, place / f"bench-{self.verb}")
        return record


def _write(record: BenchRecord, path: Path) -> None:
    from slimstate.benchmark.figures import figure_of
    from slimstate.benchmark.tables import as_latex, as_markdown
    from slimstate.report.plots import save

    record.write(path.with_suffix(".json"))
    write_text(path.with_suffix(".md"), as_markdown(record))
    write_text(path.with_suffix(".tex"), as_latex(record))
    save(figure_of(record), path)


def with_ratios(rows: Sequence[W]) -> list[W]:
    """Each row with its speed and memory relative to the widest key dim of its group that was measured."""
    widest: dict[tuple[object, ...], W] = {}
    for row in rows:
        best = widest.get(row.group)
        if not row.error and (best is None or row.key_dim > best.key_dim):
            widest[row.group] = row
    return [row if row.error else row.against(widest[row.group]) for row in rows]
