"""The verb that wins back what a cut costs, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimstate.cli.terminal import Device, Documents, Dtype, Json, PushToHub, Seed, Text, print_json, printer, pushed_to
from slimstate.system.console import TerminalReporter
from slimstate.system.errors import PlanError

if TYPE_CHECKING:
    from slimstate.reconstruction.options import ReconstructOptions
    from slimstate.records.reconstruction import ReconstructionRecord

Steps = Annotated[
    int | None, typer.Option(help="Training steps for every layer; by default 500 on a GPU and 80 on a CPU.")
]
Batch = Annotated[int | None, typer.Option(help="Windows in a step; by default 16 on a GPU and 4 on a CPU.")]
Samples = Annotated[
    int | None,
    typer.Option(help="Windows of the text; by default up to 640 on a GPU and 128 on a CPU. A tenth is held out."),
]
Length = Annotated[int, typer.Option(help="Tokens in a window.")]
Rate = Annotated[float, typer.Option(help="Learning rate of Adam at its highest.")]
Distill = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Steps of a distillation of the whole model afterwards, such as 300; taken only if it helps on windows"
        " that are held out.",
    ),
]


def reconstruct(
    model: Annotated[str, typer.Argument(help="Folder of a model that slimstate cut.")],
    out: Annotated[Path, typer.Option(help="Folder for the reconstructed model; it appears only when it is whole.")],
    data: Annotated[str, typer.Option(help=Text.format("train on"))],
    teacher: Annotated[
        str | None, typer.Option(help="The uncut model; by default the one that the cut was made from.")
    ] = None,
    steps: Steps = None,
    batch: Batch = None,
    samples: Samples = None,
    length: Length = 1024,
    learning_rate: Rate = 2e-3,
    distill: Distill = None,
    documents: Documents = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    max_memory: Annotated[
        str | None,
        typer.Option(help="Most that hidden states take, such as 0=40GiB,cpu=100GiB; what is more lies on disk."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing output folder, once the new one is whole.")
    ] = False,
    push_to_hub: PushToHub = None,
    as_json: Json = False,
) -> None:
    """Train each cut layer to give what the uncut one gave, on text alone, with one layer in memory at a time.

    Interrupted, the same command goes on at the layer it was in.
    """
    from slimstate.models.options import LoadOptions
    from slimstate.reconstruction.options import ReconstructOptions
    from slimstate.training.distill import reconstruct as rebuild

    options = ReconstructOptions(
        steps=steps, batch=batch, samples=samples, length=length, learning_rate=learning_rate, seed=seed,
        documents=documents, distill=distill,
    )  # fmt: skip
    run = LoadOptions(
        device=device, dtype=dtype, device_map=None if max_memory is None else "auto", max_memory=max_memory
    )
    reporter = TerminalReporter()
    with pushed_to(push_to_hub, reporter) as push:
        record = rebuild(
            model, out, data=data, teacher=teacher, options=options, run=run, force=force, reporter=reporter
        )
        push(record.out)
    if as_json:
        print_json(record.to_json())
        return
    show_reconstruction(record)
    printer().print(f"written to {record.out}", markup=False)


def reconstruction(wanted: bool, *, seed: int, **given: Any) -> ReconstructOptions | None:
    """The options of a reconstruction that another verb makes; to say how without that it is wanted is refused."""
    from slimstate.reconstruction.options import ReconstructOptions, within_a_cut

    with within_a_cut():
        options = ReconstructOptions(seed=seed, **given)
    if not wanted and options != ReconstructOptions(seed=seed):
        raise PlanError("how to reconstruct is said, and that it is to be done is not: give --reconstruct")
    return options if wanted else None


def show_reconstruction(record: ReconstructionRecord) -> None:
    """What it came to, in a line or two."""
    kept = sum(not layer.step for layer in record.layers)
    printer().print(
        f"reconstructed {len(record.layers) - kept} of {len(record.layers)} layers; their mean error on"
        f" {record.held_out} windows that were held out: {record.error_before:.4f} to {record.error_after:.4f}"
    )
    if record.distillation is not None:
        printer().print(record.distillation.line())
