"""The verbs that train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from slimstate.cli.terminal import Device, Dtype, Json, Seed, TerminalReporter, Text, print_json, printer

ROWS = {"before": "before", "after": "after", "uncut": "uncut", "control": "uncut, same training"}
Tokens = Annotated[int | None, typer.Option(help="Train on so many tokens, instead of --steps.")]
GradAccum = Annotated[
    int, typer.Option(help="Work on each batch in so many pieces, which takes less memory and changes nothing else.")
]
EvalText = Annotated[
    str | None, typer.Option(help="Text to measure on; by default some windows of the data are held out.")
]
EvalTokens = Annotated[int | None, typer.Option(help="Measure on the first so many tokens of it.")]
NoRepeat = Annotated[bool, typer.Option("--no-repeat", help="Refuse to train on the same text more than once.")]
SaveEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints; 20 of them by default.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint of an interrupted run.")]
ReportTo = Annotated[str, typer.Option(help="Where the Trainer logs: tensorboard, wandb, or others it knows, or none.")]
Fsdp = Annotated[bool, typer.Option("--fsdp", help="Shard the model over the processes (FSDP).")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output folder, and an unfinished run.")]
Length = Annotated[int, typer.Option(help="Tokens per window.")]
BatchSize = Annotated[int, typer.Option(help="Windows per step, over all processes.")]
LearningRate = Annotated[float, typer.Option(help="The highest learning rate.")]
LeastRate = Annotated[float, typer.Option(help="The learning rate at the end of the cosine.")]
WarmUp = Annotated[float, typer.Option(help="The share of steps in which the learning rate rises.")]


def recover(
    model: Annotated[str, typer.Argument(metavar="CUT", help="The folder of a cut model, or a hub id.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the recovered model; it appears only when whole.")
    ] = None,
    data: Annotated[str | None, typer.Option(help=Text.format("train on"))] = None,
    teacher: Annotated[
        str | None, typer.Option(help="The uncut model to learn from; by default the one the model was cut from.")
    ] = None,
    no_teacher: Annotated[bool, typer.Option("--no-teacher", help="Learn from the text alone.")] = False,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Give the uncut model the same training too, into OUT-control: how much is healing, and how much just"
            " more training? With the uncut model as CUT, only that.",
        ),
    ] = False,
    control_out: Annotated[
        Path | None, typer.Option(help="Another folder for the control; one made with the same settings is used again.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; 2000 by default.")] = None,
    tokens: Tokens = None,
    length: Length = 2048,
    batch_size: BatchSize = 16,
    grad_accum: GradAccum = 1,
    lr: LearningRate = 1e-4,
    min_lr: LeastRate = 1e-5,
    warm_up: WarmUp = 0.05,
    kd_weight: Annotated[float, typer.Option(help="Weight of the distillation beside the cross entropy.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="Temperature of the distillation.")] = 2.0,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of adapters.")] = False,
    lora_targets: Annotated[
        str | None,
        typer.Option(
            help="Endings of the names of linear maps that get an adapter, separated by commas, or all-linear;"
            " by default all projections of the linear-attention layers."
        ),
    ] = None,
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 16,
    lora_alpha: Annotated[int, typer.Option(help="Scale of the adapters, over their rank.")] = 32,
    cache_teacher: Annotated[
        Path | None, typer.Option(help="Folder to keep the teacher's best guesses in, for this and other recoveries.")
    ] = None,
    cache_top_k: Annotated[int, typer.Option(help="Guesses per token to keep there.")] = 64,
    eval_text: EvalText = None,
    eval_tokens: EvalTokens = None,
    no_repeat: NoRepeat = False,
    save_every: SaveEvery = None,
    resume: Resume = False,
    keep_adapter: Annotated[
        bool, typer.Option("--keep-adapter", help="Also write the adapter, for PEFT, into OUT/adapter.")
    ] = False,
    report_to: ReportTo = "tensorboard",
    fsdp: Fsdp = False,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be trained, and train nothing.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a cut model, with the uncut one as its teacher, and write a checkpoint that the stock class loads."""
    from slimstate.training.recover import recover as heal

    given = {name: value for name, value in locals().items() if name not in ("model", "as_json", "heal")}
    record = heal(model, **given, reporter=TerminalReporter())
    if as_json:
        print_json(record)
    elif dry_run:
        _print_preview(record)
    elif record:
        _print_outcome(record)


def train(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A shape that comes with slimstate, a config.json, or a model folder to train further.",
        ),
    ],
    data: Annotated[str, typer.Option(help=Text.format("train on"))],
    out: Annotated[Path, typer.Option(help="Folder for the model; it appears only when it is whole.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="A folder or hub id to take it from; by default one is learnt from the text.")
    ] = None,
    shared_filters: Annotated[
        str | None, typer.Option(help="One convolution filter for every head (head), or one for all of them (all).")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; 4000 by default.")] = None,
    tokens: Tokens = None,
    length: Length = 1024,
    batch_size: BatchSize = 64,
    grad_accum: GradAccum = 1,
    lr: LearningRate = 3e-3,
    min_lr: LeastRate = 3e-4,
    warm_up: WarmUp = 0.05,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay.")] = 0.0,
    second_beta: Annotated[float, typer.Option(help="AdamW's second beta.")] = 0.95,
    eval_text: EvalText = None,
    eval_tokens: EvalTokens = None,
    no_repeat: NoRepeat = False,
    save_every: SaveEvery = None,
    resume: Resume = False,
    report_to: ReportTo = "tensorboard",
    fsdp: Fsdp = False,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a model from a config and a text, or a model further, and write a checkpoint that the stock class loads."""
    from slimstate.training.pretrain import train as learn

    given = {name: value for name, value in locals().items() if name not in ("config", "as_json", "learn")}
    record = learn(config, **given, reporter=TerminalReporter())
    if as_json:
        print_json(record)
    else:
        _print_outcome(record)


def _print_preview(record: dict[str, Any]) -> None:
    console = printer()
    for title, names in (("adapters on", record["targets"]), ("trained whole", record["convolutions"])):
        if names:
            console.print(f"{title}:")
        for name in names:
            console.print(f"  {name}", markup=False)
    if record["settings"]["full"]:
        console.print("all weights are trained")
    console.print(
        f"{record['trained_parameters']:,} parameters to train beside the {record['parameters']:,} of the model"
    )
    console.print(f"{record['steps']:,} steps, {record['tokens']:,} tokens; dry run: nothing was trained")


def _print_outcome(record: dict[str, Any]) -> None:
    console, measured = printer(), record["measured"]
    table = Table("", "nats per token", "perplexity", title=f"{measured['tokens']:,} tokens: {measured['text']}")
    for name, nats in measured["nats"].items():
        table.add_row(ROWS[name], f"{nats:.4f}", f"{measured['perplexity'][name]:.2f}")
    console.print(table)
    for goal, share in measured["closed"].items():
        if share is not None:
            console.print(f"closed {share:.1%} of the gap to the {'uncut model' if goal == 'uncut' else 'control'}")
    if record["tokens_per_second"]:
        console.print(f"{record['tokens']:,} tokens at {record['tokens_per_second']:,.0f} tokens/s")
    console.print(f"written to {record['out']}", markup=False)
