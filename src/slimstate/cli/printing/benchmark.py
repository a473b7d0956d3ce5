"""The benchmarks, and how their results are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimstate.cli.commands import Command
from slimstate.cli.terminal import printer
from slimstate.workflows import bench

if TYPE_CHECKING:
    from slimstate.records.benchmark import BenchRecord


def show_bench(record: BenchRecord) -> None:
    """Print the table of a benchmark."""
    from rich.table import Table

    from slimstate.benchmark.tables import table as cells_of
    from slimstate.records.benchmark import DecodeRecord, KernelRecord

    console = printer()
    if not console.is_terminal:
        console.width = 200
    titles, body = cells_of(record, narrow=console.width < 120)
    table = Table(*titles)
    for cells in body:
        table.add_row(*cells)
    console.print(table, soft_wrap=False)
    if isinstance(record, DecodeRecord | KernelRecord):
        console.print(f"copying: {record.copy_bandwidth / 1e9:,.0f} GB/s, read and written")
    if isinstance(record, DecodeRecord):
        for entry in record.largest_batch:
            if entry.batch is not None:
                console.print(f"{entry.model}, key dim {entry.key_dim}: {entry.batch:,} sequences fit")
    if "out" in record.config:
        console.print(f"written to {record.config['out']}")


COMMANDS = (
    Command(name="bench mixer", workflow=bench.bench_mixer, config=bench.MixerBenchConfig, show=show_bench),
    Command(name="bench model", workflow=bench.bench_model, config=bench.ModelBenchConfig, show=show_bench),
    Command(name="bench decode", workflow=bench.bench_decode, config=bench.DecodeBenchConfig, show=show_bench),
    Command(name="bench calibrate", workflow=bench.bench_calibrate, config=bench.CalibrateBenchConfig, show=show_bench),
)
