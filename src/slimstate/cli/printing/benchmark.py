"""The benchmarks, and how their results are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimstate.benchmark.options import CalibrateBenchConfig, DecodeBenchConfig, MixerBenchConfig, ModelBenchConfig
from slimstate.cli.commands import Command
from slimstate.cli.terminal import Printout, Table, printer

if TYPE_CHECKING:
    from slimstate.records.benchmark import BenchRecord


def show_bench(record: BenchRecord) -> Printout:
    """Yield the table of a benchmark."""
    from slimstate.benchmark.tables import table
    from slimstate.records.benchmark import DecodeRecord, KernelRecord

    yield Table(*table(record, narrow=printer().width < 120))
    if isinstance(record, DecodeRecord | KernelRecord):
        yield f"copying: {record.copy_bandwidth / 1e9:,.0f} GB/s, read and written"
    if isinstance(record, DecodeRecord):
        for entry in record.largest_batch:
            if entry.batch is not None:
                yield f"{entry.model}, key dim {entry.key_dim}: {entry.batch:,} sequences fit"


COMMANDS = (
    Command(name="bench mixer", config=MixerBenchConfig, show=show_bench),
    Command(name="bench model", config=ModelBenchConfig, show=show_bench),
    Command(name="bench decode", config=DecodeBenchConfig, show=show_bench),
    Command(name="bench calibrate", config=CalibrateBenchConfig, show=show_bench),
)
