"""The verbs that train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.table import Table

from slimstate.cli.terminal import Device, Documents, Dtype, Json, PushToHub, Seed, Text, print_json, printer, pushed_to
from slimstate.report.numbers import fixed, perplexity
from slimstate.system.console import TerminalReporter
from slimstate.system.errors import PlanError

if TYPE_CHECKING:
    from slimstate.records.training import TrainedRecord
    from slimstate.training.options import RecoverOptions
    from slimstate.training.recover import Preview

P = TypeVar("P", "Preview", "TrainedRecord")

ROWS = {"before": "before", "after": "after", "uncut": "uncut", "control": "uncut, same training"}
TEACHER = "uncut, trained: the teacher"
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
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="CUT", help="The folder of a cut model, or a hub id.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the recovered model; it appears only when whole.")
    ] = None,
    data: Annotated[str | None, typer.Option(help=Text.format("train on"))] = None,
    documents: Documents = None,
    teacher: Annotated[
        str | None, typer.Option(help="The uncut model to learn from; by default the one the model was cut from.")
    ] = None,
    no_teacher: Annotated[bool, typer.Option("--no-teacher", help="Learn from the text alone.")] = False,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Give the uncut model the same training too, into OUT-control: how much is recovery, and how much just"
            " more training? With the uncut model as CUT, only that.",
        ),
    ] = False,
    control_out: Annotated[
        Path | None, typer.Option(help="Another folder for the control; one made with the same settings is used again.")
    ] = None,
    control_teaches: Annotated[
        bool,
        typer.Option(
            "--control-teaches",
            help="Train that control first, from the text alone, and learn from it in place of the uncut model: for"
            " text that has more to teach than the uncut model knows.",
        ),
    ] = False,
    preset: Annotated[
        str | None,
        typer.Option(
            help="paper: the paper's recovery of DeltaNet and Gated DeltaNet, and where its text is silent what its"
            " released code trains (adapters on q, k and v, norms and biases unfrozen). Options given beside it count."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; 2000 by default.")] = None,
    tokens: Tokens = None,
    length: Length = 2048,
    batch_size: BatchSize = 16,
    grad_accum: GradAccum = 1,
    lr: Annotated[
        float | None,
        typer.Option(help="Highest learning rate; by default 5e-4 for models up to 512 wide, and less for wider ones."),
    ] = None,
    min_lr: Annotated[float | None, typer.Option(help="The rate it falls to; a twentieth by default.")] = None,
    warm_up: WarmUp = 0.05,
    kd_weight: Annotated[float, typer.Option(help="Weight of the distillation beside the cross entropy.")] = 4.0,
    temperature: Annotated[float, typer.Option(help="Temperature of the distillation.")] = 2.0,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Train all weights: the default, but for models whose files keep some of them, such as experts, in"
            " another form.",
        ),
    ] = False,
    mixers: Annotated[bool, typer.Option("--mixers", help="Train the mixers whole, and nothing else.")] = False,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train low-rank adapters and the convolutions: least memory, recovers less.")
    ] = False,
    lora_targets: Annotated[
        str | None,
        typer.Option(
            help="Endings of the names of linear maps that get an adapter, separated by commas, or all-linear;"
            " by default all projections of the linear-attention layers."
        ),
    ] = None,
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 16,
    lora_alpha: Annotated[int, typer.Option(help="Scale of the adapters, over their rank.")] = 32,
    unfreeze: Annotated[
        str | None, typer.Option(help="Train norms, biases, or both (norms,biases) of the whole model too.")
    ] = None,
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
    push_to_hub: PushToHub = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a cut model, with the uncut one as its teacher, and write a checkpoint that the stock class loads."""
    from slimstate.models.options import RunOptions
    from slimstate.training import options as values
    from slimstate.training import recover as verb

    flags = {
        "steps": steps, "tokens": tokens, "length": length, "batch_size": batch_size, "lr": lr, "min_lr": min_lr,
        "warm_up": warm_up, "seed": seed, "kd_weight": kd_weight, "temperature": temperature, "no_teacher": no_teacher,
        "cache_teacher": cache_teacher, "cache_top_k": cache_top_k, "full": full, "mixers": mixers, "lora": lora,
        "lora_targets": lora_targets, "lora_rank": lora_rank, "lora_alpha": lora_alpha, "unfreeze": unfreeze,
    }  # fmt: skip
    options = _preset(preset, {name: value for name, value in flags.items() if _was_given(context, name)})
    where, reporter = RunOptions(device=device, dtype=dtype), TerminalReporter()
    beside = values.ControlOptions.of(control, control_out, control_teaches)
    if dry_run:
        preview = verb.preview(model, teacher=teacher, control=beside, options=options, run=where, reporter=reporter)
        _print(preview, as_json, _print_preview)
        return
    if out is None or data is None:
        raise PlanError("give --data TEXT and --out DIR, or --dry-run to train nothing")
    with pushed_to(push_to_hub, reporter) as push:
        record = verb.recover(
            model,
            out,
            data=values.TrainingText(
                data=data, eval_text=eval_text, eval_tokens=eval_tokens, no_repeat=no_repeat, documents=documents
            ),
            teacher=teacher,
            control=beside,
            options=options,
            trainer=values.TrainerOptions(
                grad_accum=grad_accum, save_every=save_every, report_to=report_to, fsdp=fsdp, keep_adapter=keep_adapter,
                resume=resume, force=force,
            ),
            run=where,
            reporter=reporter,
        )  # fmt: skip
        push(record.out)
    _print(record, as_json, _print_outcome)


def _was_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has the option, and it is not its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _preset(name: str | None, given: Mapping[str, object]) -> RecoverOptions:
    """The options of a preset, or the usual ones, but for those that were given."""
    from slimstate.training.options import RecoverOptions, preset_named

    base = RecoverOptions() if name is None else preset_named(name)
    if "tokens" in given and "steps" not in given:
        given = {**given, "steps": None}
    if given.get("full") or given.get("mixers"):
        given = {"lora": False, "lora_targets": None, "unfreeze": None, **given}
    elif "lora_rank" in given or "lora_alpha" in given:  # also where it is the usual one
        given = {"lora": True, **given}
    return replace(base, **given)  # type: ignore[arg-type]


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
    documents: Documents = None,
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
    from slimstate.models.options import RunOptions
    from slimstate.training import options as values
    from slimstate.training import pretrain as verb

    record = verb.train(
        config,
        out,
        data=values.TrainingText(
            data=data, eval_text=eval_text, eval_tokens=eval_tokens, no_repeat=no_repeat, documents=documents
        ),
        tokenizer=tokenizer,
        shared_filters=shared_filters,
        options=values.PretrainOptions(
            steps=steps, tokens=tokens, length=length, batch_size=batch_size, lr=lr, min_lr=min_lr, warm_up=warm_up,
            seed=seed, weight_decay=weight_decay, second_beta=second_beta,
        ),
        trainer=values.TrainerOptions(
            grad_accum=grad_accum, save_every=save_every, report_to=report_to, fsdp=fsdp, resume=resume, force=force
        ),
        run=RunOptions(device=device, dtype=dtype),
        reporter=TerminalReporter(),
    )  # fmt: skip
    _print(record, as_json, _print_outcome)


def _print(result: P, as_json: bool, in_words: Callable[[P], None]) -> None:
    if as_json:
        print_json(result.to_json())
    else:
        in_words(result)


def _print_preview(preview: Preview) -> None:
    console = printer()
    whole = (*preview.convolutions, *preview.unfrozen)
    for title, names in (("adapters on", preview.targets), ("trained whole", whole)):
        if names:
            console.print(f"{title}:")
        for name in names:
            console.print(f"  {name}", markup=False)
    if preview.settings.full:
        console.print("all weights are trained")
    if preview.settings.mixers:
        console.print("the mixers are trained whole")
    if preview.targets:
        console.print(
            f"{preview.trained_parameters:,} parameters to train beside the {preview.parameters:,} of the model"
        )
    else:
        console.print(f"{preview.trained_parameters:,} of {preview.parameters:,} parameters")
    console.print(f"{preview.steps:,} steps, {preview.tokens:,} tokens; dry run: nothing was trained")


def _print_outcome(record: TrainedRecord) -> None:
    console, measured = printer(), record.measured
    size = f"{measured.tokens:,} tokens, {measured.words:,} words, {measured.bytes:,} bytes"
    columns = ("", "nats per token", "perplexity per token", "per word", "bits per byte")
    table = Table(*columns, title=f"{size}: {measured.text}")
    titles = {**ROWS, "control": TEACHER} if getattr(record, "control_teaches", False) else ROWS
    for name, nats in measured.nats.known().items():
        units = (perplexity(measured.perplexity[name]), perplexity(measured.word_perplexity[name]))
        table.add_row(titles[name], f"{nats:.4f}", *units, fixed(measured.bits_per_byte[name], 4))
    console.print(table)
    for goal, share in measured.closed.items():
        if share is not None:
            console.print(f"closed {share:.1%} of the gap to the {'uncut model' if goal == 'uncut' else 'control'}")
    if record.tokens_per_second:
        console.print(f"{record.tokens:,} tokens at {record.tokens_per_second:,.0f} tokens/s")
    console.print(f"written to {record.out}", markup=False)
