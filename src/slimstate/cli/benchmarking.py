"""The verbs that time: `slimstate bench mixer|model|decode|calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from slimstate.cli.terminal import Device, Documents, Dtype, Json, Text, print_json, printer
from slimstate.system.console import TerminalReporter

if TYPE_CHECKING:
    from slimstate.records.benchmark import BenchRecord

bench = typer.Typer(no_args_is_help=True, help="Time mixers, models, decoding and calibration at several key dims.")
Out = Annotated[Path | None, typer.Option(help="Folder for the record, the tables and the figure.")]
Rounds = Annotated[int, typer.Option(help="Timings to take the median of.")]
Jobs = Annotated[int, typer.Option(help="Processes that compile kernels before they are timed; GPU only.")]
Models = Annotated[
    str, typer.Option(help="Model folders, config files or names of shipped configs, with commas between them.")
]
KeyDims = Annotated[
    str | None, typer.Option(help="Key dims; by default a model's own, a half and a quarter. Not above its own.")
]
Batch = Annotated[int, typer.Option(help="Sequences at once.")]
Length = Annotated[int, typer.Option(help="Tokens of each.")]


@bench.command()
def mixer(
    models: Annotated[str, typer.Option(help="Model types, with commas between them.")] = "delta_net,gated_deltanet",
    key_dims: Annotated[
        str, typer.Option(help="Key dims, the widest of which the others are compared with.")
    ] = "128,64,32",
    batch: Batch = 32,
    length: Length = 2048,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 2048,
    heads: Annotated[int, typer.Option(help="Heads.")] = 16,
    value_dim: Annotated[int, typer.Option(help="Value dim of each head.")] = 128,
    no_gate: Annotated[
        bool,
        typer.Option("--no-gate", help="Leave out the output gate of layers that have one, as the paper's code does."),
    ] = False,
    modes: Annotated[str, typer.Option(help="forward; train: forward and backward.")] = "forward,train",
    rounds: Rounds = 20,
    jobs: Jobs = 0,
    device: Device = None,
    dtype: Dtype = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """One linear-attention layer by itself, in the sizes that the paper names. On a CPU take small ones.

    The paper's released code has 4096 tokens and --no-gate (recipes/throughput.toml).
    """
    from slimstate.workflows.bench import bench_mixer

    record = bench_mixer(
        models=models, key_dims=key_dims, batch=batch, length=length, hidden=hidden, heads=heads, value_dim=value_dim,
        no_gate=no_gate, modes=modes, rounds=rounds, jobs=jobs, device=device, dtype=dtype, out=out,
        progress=TerminalReporter(),
    )  # fmt: skip
    show(record, out, as_json)


@bench.command()
def model(
    models: Models = "delta_net-370m",
    key_dims: KeyDims = None,
    batch: Batch = 8,
    length: Length = 2048,
    modes: Annotated[
        str, typer.Option(help="prefill; forward: logits of every token; train: loss, gradient and AdamW.")
    ] = "prefill,train",
    rounds: Rounds = 10,
    jobs: Jobs = 0,
    device: Device = None,
    dtype: Dtype = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Whole models: a prefill, a forward pass, a training step. Random weights, but for a folder at its own key dim."""
    from slimstate.workflows.bench import bench_model

    record = bench_model(
        models=models, key_dims=key_dims, batch=batch, length=length, modes=modes, rounds=rounds, jobs=jobs,
        device=device, dtype=dtype, out=out, progress=TerminalReporter(),
    )  # fmt: skip
    show(record, out, as_json)


@bench.command()
def decode(
    models: Annotated[
        str | None,
        typer.Option(
            help="Model folders, config files or names of shipped configs, with commas between them; by default"
            " delta_net-1.3b. With --kernels, shapes: qwen3_next, qwen3_5, mamba2, by default all."
        ),
    ] = None,
    key_dims: KeyDims = None,
    batches: Annotated[
        str | None,
        typer.Option(
            help="Numbers of sequences to decode together, by default 1,4,16,64,256,1024,4096; with --kernels one, by"
            " default 1024."
        ),
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE=PATH",
            help="Time the kernels of an engine, vllm or sglang, by themselves, decoding and prefill, at every multiple"
            " of 16: those in a folder that holds the engine, unpacked from its wheel.",
        ),
    ] = None,
    rounds: Rounds = 20,
    jobs: Jobs = 0,
    device: Device = None,
    dtype: Dtype = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """One more token for each of many sequences, against the bandwidth of the device; and how many sequences fit."""
    from slimstate.workflows.bench import bench_decode

    record = bench_decode(
        models=models, key_dims=key_dims, batches=batches, kernels=kernels, rounds=rounds, jobs=jobs, device=device,
        dtype=dtype, out=out, progress=TerminalReporter(),
    )  # fmt: skip
    show(record, out, as_json)


@bench.command()
def calibrate(
    model: Annotated[str, typer.Option(help="A model folder, a config file or the name of a shipped config.")] = (
        "delta_net-1.3b"
    ),
    methods: Annotated[str, typer.Option(help="Selectors, with commas between them.")] = "drrqr,s-wanda,grad",
    key_dim: Annotated[int | None, typer.Option(help="Channels to choose in each head; by default half.")] = None,
    samples: Annotated[int, typer.Option(help="Calibration windows.")] = 128,
    length: Annotated[int, typer.Option(help="Tokens per calibration window.")] = 2048,
    data: Annotated[str | None, typer.Option(help=Text.format("calibrate on") + " Random tokens by default.")] = None,
    documents: Documents = None,
    rounds: Rounds = 3,
    device: Device = None,
    dtype: Dtype = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """What each method's calibration costs beside a plain forward pass, and how long the choice takes."""
    from slimstate.workflows.bench import bench_calibrate

    record = bench_calibrate(
        model=model, methods=methods, key_dim=key_dim, samples=samples, length=length, data=data, documents=documents,
        rounds=rounds, device=device, dtype=dtype, out=out, progress=TerminalReporter(),
    )  # fmt: skip
    show(record, out, as_json)


def show(record: BenchRecord, out: Path | None, as_json: bool) -> None:
    from slimstate.benchmark.tables import table as table_of
    from slimstate.records.benchmark import DecodeRecord, KernelRecord

    if as_json:
        print_json(record.to_json())
        return
    console = printer()
    if not console.is_terminal:
        console.width = 200
    titles, body = table_of(record, narrow=console.width < 120)
    table = Table(*titles)
    for cells in body:
        table.add_row(*cells)
    console.print(table)
    if isinstance(record, DecodeRecord | KernelRecord):
        console.print(f"copying: {record.copy_bandwidth / 1e9:,.0f} GB/s, read and written")
    if isinstance(record, DecodeRecord):
        for entry in record.largest_batch:
            if entry.batch is not None:
                console.print(f"{entry.model}, key dim {entry.key_dim}: {entry.batch:,} sequences fit")
    if out is not None:
        console.print(f"written to {out}", markup=False)
