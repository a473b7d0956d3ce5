"""The verbs that look at a model and cut it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from slimstate.cli.pool import (
    Context,
    Engine,
    KvDtype,
    PoolAsked,
    PoolStateDtype,
    PrefixCaching,
    SpeculativeTokens,
    TensorParallel,
    short_name,
    show_pool,
)
from slimstate.cli.reconstructing import (
    Batch,
    Distill,
    Length,
    Rate,
    Samples,
    Steps,
    reconstruction,
    show_reconstruction,
)
from slimstate.cli.terminal import (
    CalibrationLength,
    CalibrationSamples,
    Device,
    Documents,
    Dtype,
    Json,
    Model,
    PushToHub,
    Seed,
    Text,
    mebibytes,
    print_json,
    printer,
    pushed_to,
)
from slimstate.system.console import TerminalReporter
from slimstate.system.errors import MAX_LINE, PlanError, quoted

if TYPE_CHECKING:
    from slimstate.pruning.budget import Budget
    from slimstate.records.cut import CutRecord, EstimateRecord

StateMb = Annotated[
    float | None, typer.Option(help="MiB of recurrent state per sequence: the largest key dim that fits is chosen.")
]
Sequences = Annotated[int | None, typer.Option(help="With --memory-gb: so many sequences at once must fit.")]
MemoryGb = Annotated[float | None, typer.Option(help="GiB that the states of all --sequences may take.")]
StateDtype = Annotated[str, typer.Option(help="What the engine keeps states in: fp32 or bf16.")]


def inspect(
    model: Model,
    state_mb: StateMb = None,
    sequences: Sequences = None,
    memory_gb: MemoryGb = None,
    state_dtype: PoolStateDtype = None,
    engine: Engine = None,
    context: Context = None,
    prefix_caching: PrefixCaching = False,
    tensor_parallel: TensorParallel = 1,
    speculative_tokens: SpeculativeTokens = 0,
    kv_dtype: KvDtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Show a model's recurrent state and the key dims worth choosing. Reads config and tensor headers only.

    MODEL may be a config.json alone. Of a hub id nothing but the config and the headers is downloaded.
    """
    from slimstate.pruning.inspect import inspect as look
    from slimstate.serving.engines import rules_of

    asked = PoolAsked(
        memory_gb=memory_gb, context=context, prefix_caching=prefix_caching, tensor_parallel=tensor_parallel,
        state_dtype=state_dtype, kv_dtype=kv_dtype, speculative_tokens=speculative_tokens,
    )  # fmt: skip
    if context is not None and engine is not None:
        show_pool(model, engine, asked, as_json)
        return
    asked.check_unused(sequences)
    record = look(
        model, budget=budget_of(state_mb, sequences, memory_gb, state_dtype or "fp32"), engine=engine, context=context
    )
    if as_json:
        print_json(record.to_json())
        return
    console, state = Console(highlight=False, markup=False), record.state_bytes
    shared = f" ({record.value_heads} value heads)" if record.value_heads != record.heads else ""
    console.print(f"{record.model}: {record.model_type}{record.counted}", markup=False)
    dims = f"key dim {record.key_dim}, value dim {record.value_dim}"
    console.print(f"{record.mixers} linear layers{record.left_alone}, {record.heads} heads{shared}, {dims}")
    console.print(
        f"recurrent state per sequence: {mebibytes(state['fp32'])} in fp32, {mebibytes(state['bf16'])} in bf16"
    )
    if record.cached:
        console.print(f"for each sequence{record.cached}".replace("sequence, and", "sequence also"))
    if (cut := record.already_cut) is not None:
        console.print(f"cut before: key dim {cut.width} to {cut.key_dim} by {cut.method}")
    table = Table("key dim", "compression", "state fp32", "state bf16", "sequences in the same memory", "parameters")
    for option in record.options:
        sizes = option.state_bytes
        table.add_row(
            str(option.key_dim),
            f"{option.compression:.3g}",
            mebibytes(sizes["fp32"]),
            mebibytes(sizes["bf16"]),
            f"{option.sequences:.2f}x",
            "" if option.parameters is None else f"{option.parameters:,}",
        )
    console.print(table)
    if record.budget is not None:
        console.print(record.budget.why)
    if record.speed:
        console.print(record.speed.advice, markup=False)
    rules = rules_of(record.model_type, engine)
    console.print(f"serving, as of {record.serving.date}:" if rules else "serving: no engine was examined")
    for rule in rules:
        console.print(f"  {rule.describe(condition=True)}", markup=False)
    if record.serving.advice is not None:
        console.print(record.serving.advice, markup=False)


def prune(
    model: Model,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the cut model; it appears only when it is whole.")
    ] = None,
    method: Annotated[str, typer.Option(help="{methods}")] = "drrqr",
    compression: Annotated[
        float | None,
        typer.Option(
            help="Share of key channels to remove; 0.5 removes half. Rounded to a key dim that is a multiple of 16."
        ),
    ] = None,
    key_dim: Annotated[int | None, typer.Option(help="Channels per head to keep, exactly.")] = None,
    state_mb: StateMb = None,
    sequences: Sequences = None,
    memory_gb: MemoryGb = None,
    state_dtype: StateDtype = "fp32",
    data: Annotated[
        str | None,
        typer.Option(help=Text.format("calibrate on")),
    ] = None,
    documents: Documents = None,
    samples: CalibrationSamples = None,
    length: CalibrationLength = None,
    score: Annotated[
        str, typer.Option(help="Judge channels by keys and queries (kq), keys (k) or queries (q).")
    ] = "kq",
    seed: Seed = 0,
    rrqr_f: Annotated[
        float, typer.Option("--rrqr-f", help="drrqr exchanges channels until none grows the volume more than this.")
    ] = 1.5,
    device: Device = None,
    dtype: Dtype = None,
    device_map: Annotated[
        str | None,
        typer.Option(
            help="auto: calibrate a model larger than the device, its layers on GPUs, in host memory, on disk."
        ),
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option(help="Most that --device-map takes for weights, such as 0=40GiB,cpu=100GiB.")
    ] = None,
    keep_norm_eps: Annotated[
        bool,
        typer.Option("--keep-norm-eps", help="Leave norm_eps alone, though the key dim sets the query scale."),
    ] = False,
    evidence: Annotated[
        Path | None, typer.Option(help="File to keep calibration results in, or to take them from.")
    ] = None,
    apply: Annotated[
        Path | None, typer.Option(help="Repeat the cut of this slimstate_plan.json; no calibration.")
    ] = None,
    reconstruct: Annotated[
        bool,
        typer.Option("--reconstruct", help="Train every cut layer on the text to give what it gave before."),
    ] = False,
    reconstruct_steps: Steps = None,
    reconstruct_batch: Batch = None,
    reconstruct_samples: Samples = None,
    reconstruct_length: Length = 1024,
    reconstruct_learning_rate: Rate = 2e-3,
    distill: Distill = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Choose channels, write nothing.")] = False,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Estimate time and memory, load nothing, write nothing.")
    ] = False,
    engine: Engine = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing output folder, once the new one is whole.")
    ] = False,
    push_to_hub: PushToHub = None,
    as_json: Json = False,
) -> None:
    """Cut a model to fewer key/query channels per head and write a checkpoint that the stock class loads."""
    from slimstate.models.options import LoadOptions
    from slimstate.pruning.estimate import estimate
    from slimstate.pruning.options import Calibration, CutOptions
    from slimstate.pruning.prune import apply_plan
    from slimstate.training.distill import prune as cut

    reporter = TerminalReporter()
    budget = budget_of(state_mb, sequences, memory_gb, state_dtype)
    if out is None and not (dry_run or plan_only):
        raise PlanError("give --out DIR, or --dry-run to write nothing")
    target = None if dry_run else out
    if push_to_hub is not None and (dry_run or plan_only):
        raise PlanError("--push-to-hub uploads what is written: leave out --dry-run and --plan-only")
    if apply is not None:
        if plan_only:
            raise PlanError(
                "--apply has its plan already and loads no model: there is nothing for --plan-only to estimate"
            )
        if reconstruct:
            raise PlanError("--apply makes a cut that is known; reconstruct it afterwards with slimstate reconstruct")
        if any(x is not None for x in (compression, key_dim, budget)):
            raise PlanError(
                "--apply has its plan, which says how much is kept: leave out --compression, --key-dim and budgets"
            )
        with pushed_to(push_to_hub, reporter) as push:
            record = apply_plan(model, apply, target, force=force, engine=engine, reporter=reporter)
            _show(record, as_json)
            push(record.out)
        return
    calibration = Calibration(
        data=data, documents=documents, samples=samples, length=length, seed=seed, evidence=evidence
    )
    load = LoadOptions(device=device, dtype=dtype, device_map=device_map, max_memory=max_memory)
    options = CutOptions(
        score=score, seed=seed, f=rrqr_f, keep_norm_eps=keep_norm_eps, force=force, engine=engine,
        reconstruct=reconstruction(
            reconstruct, steps=reconstruct_steps, batch=reconstruct_batch, samples=reconstruct_samples,
            length=reconstruct_length, learning_rate=reconstruct_learning_rate, seed=seed,
            distill=distill,
        ),
    )  # fmt: skip
    if plan_only:
        planned = estimate(
            model, target, key_dim=key_dim, compression=compression, budget=budget, method=method,
            calibration=calibration, options=options, run=load, reporter=reporter,
        )  # fmt: skip
        if as_json:
            print_json(planned.to_json())
        else:
            _print_estimate(planned)
        return
    with pushed_to(push_to_hub, reporter) as push:
        record = cut(
            model, target, key_dim=key_dim, compression=compression, budget=budget, method=method,
            calibration=calibration, options=options, run=load, reporter=reporter,
        )  # fmt: skip
        _show(record, as_json)
        push(record.out)


def budget_of(
    state_mb: float | None, sequences: int | None, memory_gb: float | None, state_dtype: str
) -> Budget | None:
    """What was asked for, if anything was."""
    from slimstate.pruning.budget import Budget, check_kept_in

    kept_in = short_name(state_dtype)
    check_kept_in(kept_in)
    if state_mb is None and sequences is None and memory_gb is None:
        return None
    return Budget(state_mb=state_mb, sequences=sequences, memory_gb=memory_gb, state_dtype=kept_in)


def _show(record: CutRecord, as_json: bool) -> None:
    if as_json:
        print_json(record.to_json())
        return
    console, states, parameters = printer(), record.state_bytes, record.parameters
    if record.kernels is None:
        console.print("kernels: none ran")
    console.print(f"{record.method}: key dim {record.width} to {record.key_dim} in every head of {record.model_type}")
    console.print(f"state per sequence (fp32): {mebibytes(states.before['fp32'])} to {mebibytes(states.after['fp32'])}")
    console.print(f"parameters: {parameters.before:,} to {parameters.after:,}")
    if record.correction:
        console.print(record.correction)
    for line in _certificate_lines(record.certificate):
        console.print(line)
    if record.left_out:
        console.print(f"left out, because they hold other weights: {quoted(', '.join(record.left_out), MAX_LINE)}")
    if record.reconstruction is not None:
        show_reconstruction(record.reconstruction)
    console.print(f"written to {record.out}" if record.out else "dry run: nothing was written", markup=False)


def _print_estimate(record: EstimateRecord) -> None:
    console = printer()
    calibrated = f", {record.tokens:,} tokens on {record.device} in {record.dtype}" if record.tokens else ""
    console.print(f"{record.method} to key dim {record.key_dim}{calibrated}: about")
    for stage, seconds in record.seconds.items():
        console.print(f"  {seconds:,.1f} s  {stage}")
    for sizes, title in ((record.gpu_bytes, "GPU memory"), (record.host_bytes, "host memory")):
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items() if name != "total")
        if sizes["total"]:
            console.print(f"  {sizes['total'] / 2**30:.2f} GiB  {title}: {parts}")
    console.print(f"  {record.disk_bytes / 2**30:.2f} GiB  on disk, at most")
    console.print("nothing was loaded or written; expect these to be wrong by up to a factor of two")


def _certificate_lines(certificate: Mapping[str, float | None]) -> Iterator[str]:
    if "rho" in certificate:
        yield f"largest rho left: {certificate['rho']:.3f} after {certificate['swaps']:.0f} exchanges"
    if "variance_lost" in certificate:
        yield f"most variance that a head loses: {certificate['variance_lost']:.2%}"
    if "condition_after" in certificate:
        before, after = (
            "singular" if value is None else f"{value:.3g}"
            for value in (certificate["condition_before"], certificate["condition_after"])
        )
        yield f"worst condition number of a head's keys: {before} before, {after} after"
