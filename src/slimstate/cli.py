"""The command `slimstate`: parse, call one function, print where the result is.

Results go to standard output; everything else goes to standard error. Bad input is one line and exit code 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from slimstate.errors import SlimstateError
from slimstate.reporter import Reporter
from slimstate.selectors import SELECTORS

T = TypeVar("T")
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON record instead of a table.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU where there is one.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; by default bfloat16 on a GPU, float32 on a CPU.")
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or a hub id.")]
# typer carries its own copy of click in some versions, so the class is taken from where typer raises it
USAGE_ERROR: Any = typer.BadParameter.__base__
METHODS = "; ".join(f"{selector.name}: {selector.summary}" for selector in SELECTORS.values())


class TerminalReporter(Reporter):
    """Lines and progress bars on standard error; bars only where that is a terminal."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        if not self.console.is_terminal:
            yield from items
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            yield from progress.track(items, total=total, description=label)

    def waiting(self, label: str) -> AbstractContextManager[object]:
        return self.console.status(label) if self.console.is_terminal else nullcontext()


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=2))


def _mib(count: int) -> str:
    return f"{count / 2**20:,.2f} MiB"


@app.command()
def inspect(model: Model, as_json: Json = False) -> None:
    """Show a model's recurrent state and the key dims worth choosing. Reads config and tensor headers only."""
    from slimstate.overview import inspect as look

    record = look(model)
    if as_json:
        _print_json(record)
        return
    console = Console(highlight=False)
    softmax = f", {record['softmax_layers']} softmax layers left alone" if record["softmax_layers"] else ""
    shared = f" ({record['value_heads']} value heads)" if record["value_heads"] != record["heads"] else ""
    state = record["state_bytes"]
    console.print(f"{record['model']}: {record['model_type']}, {record['parameters']:,} parameters", markup=False)
    dims = f"key dim {record['key_dim']}, value dim {record['value_dim']}"
    console.print(f"{record['mixers']} linear layers{softmax}, {record['heads']} heads{shared}, {dims}")
    console.print(f"recurrent state per sequence: {_mib(state['fp32'])} in fp32, {_mib(state['bf16'])} in bf16")
    if record["already_cut"]:
        cut = record["already_cut"]
        console.print(f"cut before: key dim {cut['width']} to {cut['key_dim']} by {cut['method']}")
    table = Table("key dim", "compression", "state fp32", "state bf16", "sequences in the same memory", "parameters")
    for option in record["options"]:
        sizes = option["state_bytes"]
        table.add_row(
            str(option["key_dim"]),
            f"{option['compression']:.3g}",
            _mib(sizes["fp32"]),
            _mib(sizes["bf16"]),
            f"{state['fp32'] / sizes['fp32']:.2f}x",
            f"{option['parameters']:,}",
        )
    console.print(table)


@app.command()
def prune(
    model: Model,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the cut model; it appears only when it is whole.")
    ] = None,
    method: Annotated[str, typer.Option(help=METHODS)] = "drrqr",
    compression: Annotated[
        float | None,
        typer.Option(
            help="Share of key channels to remove; 0.5 removes half. Rounded to a key dim that is a multiple of 16."
        ),
    ] = None,
    key_dim: Annotated[int | None, typer.Option(help="Channels per head to keep, exactly.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Calibration text: .txt, .jsonl, .parquet, .xz or .gz of one, a folder of them, or a datasets name."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Calibration windows.")] = 128,
    length: Annotated[int, typer.Option(help="Tokens per calibration window.")] = 2048,
    score: Annotated[
        str, typer.Option(help="Judge channels by keys and queries (kq), keys (k) or queries (q).")
    ] = "kq",
    seed: Annotated[int, typer.Option(help="For the choice of windows and for random channels.")] = 0,
    rrqr_f: Annotated[
        float, typer.Option("--rrqr-f", help="drrqr exchanges channels until none grows the volume more than this.")
    ] = 1.5,
    device: Device = None,
    dtype: Dtype = None,
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Choose channels, write nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing output folder, once the new one is whole.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Cut a model to fewer key/query channels per head and write a checkpoint that the stock class loads."""
    from slimstate.prune import prune as cut

    record = cut(
        model,
        out,
        method=method,
        compression=compression,
        key_dim=key_dim,
        data=data,
        samples=samples,
        length=length,
        score=score,
        seed=seed,
        f=rrqr_f,
        device=device,
        dtype=dtype,
        keep_norm_eps=keep_norm_eps,
        evidence=evidence,
        apply=apply,
        dry_run=dry_run,
        force=force,
        reporter=TerminalReporter(),
    )
    if as_json:
        _print_json(record)
        return
    console = Console(highlight=False, soft_wrap=True)
    states, parameters = record["state_bytes"], record["parameters"]
    if record["kernels"] is None:
        console.print("kernels: none ran")
    console.print(
        f"{record['method']}: key dim {record['width']} to {record['key_dim']} in every head of {record['model_type']}"
    )
    console.print(f"state per sequence (fp32): {_mib(states['before']['fp32'])} to {_mib(states['after']['fp32'])}")
    console.print(f"parameters: {parameters['before']:,} to {parameters['after']:,}")
    if record["corrected"]:
        factor = record["width"] / record["key_dim"]
        console.print(f"norm_eps times {factor:.4g}: makes up for the new query scale, so that cutting is zeroing")
    for line in _certificate_lines(record["certificate"]):
        console.print(line)
    if record.get("left_out"):
        console.print(f"left out, because they hold other weights: {', '.join(record['left_out'])}", markup=False)
    console.print(f"written to {record['out']}" if record["out"] else "dry run: nothing was written", markup=False)


def _certificate_lines(certificate: dict[str, float | None]) -> Iterator[str]:
    if "rho" in certificate:
        yield f"largest rho left: {certificate['rho']:.3f} after {certificate['swaps']:.0f} exchanges"
    if "condition_after" in certificate:
        before, after = (
            "singular" if value is None else f"{value:.3g}"
            for value in (certificate["condition_before"], certificate["condition_after"])
        )
        yield f"worst condition number of a head's keys: {before} before, {after} after"


@app.command(name="eval")
def evaluate(
    model: Model,
    text: Annotated[str, typer.Option(help="Text to predict: .txt, .jsonl, .parquet, .xz or .gz of one, or a folder.")],
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 1024,
    max_tokens: Annotated[int | None, typer.Option(help="Use only the first tokens of the text.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Perplexity of a model on a text, over windows that do not overlap."""
    from slimstate.evaluate import evaluate as measure

    record = measure(
        model, text, length=length, max_tokens=max_tokens, device=device, dtype=dtype, reporter=TerminalReporter()
    )
    if as_json:
        _print_json(record)
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"perplexity {record['perplexity']:.3f} per token ({record['windows']} windows of {record['length']} tokens)"
    )
    per_byte = f"{record['nats_per_byte']:.4f} nats and {record['bits_per_byte']:.4f} bits per byte"
    console.print(f"{record['nats_per_token']:.4f} nats per token, {per_byte}")


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Make the recurrent state of trained linear-attention language models smaller."""
    if version:
        from slimstate import __version__

        print(__version__)
        raise typer.Exit


def main() -> None:
    try:
        code = app(standalone_mode=False)
    except SlimstateError as error:
        code = _complain(str(error))
    except USAGE_ERROR as error:
        code = _complain(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        print("stopped; nothing was written", file=sys.stderr)
        code = 130
    sys.exit(code)


def _complain(message: str) -> int:
    print("slimstate: " + " ".join(message.split()), file=sys.stderr)
    return 2
