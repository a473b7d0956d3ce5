"""The verbs that measure models and show what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from slimstate.cli.pool import full_name
from slimstate.cli.reconstructing import Batch, Length, Rate, Samples, Steps, reconstruction
from slimstate.cli.terminal import (
    CalibrationLength,
    CalibrationSamples,
    Device,
    Documents,
    Dtype,
    Json,
    Model,
    Seed,
    Text,
    listed,
    mebibytes,
    print_json,
    printer,
)
from slimstate.report.numbers import HUGE, fixed, perplexity
from slimstate.system.console import TerminalReporter

if TYPE_CHECKING:
    from slimstate.records.evaluation import EvaluationRecord, Measure
    from slimstate.records.sweep import Row, SweepRecord, Uncut

MaxTokens = Annotated[int | None, typer.Option(help="Use only the first tokens of the text.")]
Tasks = Annotated[
    str | None, typer.Option(help="Tasks of lm-eval, with commas between them; paper: the seven of the paper.")
]
TaskFolder = Annotated[
    Path | None, typer.Option(help="Folder with TASK.jsonl or TASK.parquet to use in place of hub datasets.")
]
Limit = Annotated[int | None, typer.Option(help="Documents per task.")]
MaxLength = Annotated[
    int | None,
    typer.Option(
        help="Most tokens that tasks show a model at once; by default what its config names (the paper's code: 10000)."
    ),
]


StateEvery = Annotated[
    int, typer.Option(help="Tokens after which states are stored: 1 as engines decode, more as they prefill in pieces.")
]


def evaluate(
    model: Model,
    text: Annotated[str | None, typer.Option(help=Text.format("predict"))] = None,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 1024,
    max_tokens: MaxTokens = None,
    documents: Documents = None,
    tasks: Tasks = None,
    recall: Annotated[
        bool,
        typer.Option(
            "--recall",
            help="The six recall tasks: DROP, FDA, NQ, SQuAD, SWDE, TriviaQA. How their prompts differ from"
            " prefix-linear-attention's: docs/EXPERIMENTS.md.",
        ),
    ] = False,
    associative: Annotated[
        bool, typer.Option("--associative", help="Also recall of random pairs placed in --text; needs no download.")
    ] = False,
    task_data: TaskFolder = None,
    limit: Limit = None,
    max_length: MaxLength = None,
    baseline: Annotated[str | None, typer.Option(help="A second model to put beside this one.")] = None,
    state_dtype: Annotated[
        str,
        typer.Option(
            help="States are kept in this between steps, as in an engine: float32, bfloat16 or float8_e4m3. A baseline"
            " keeps float32."
        ),
    ] = "float32",
    state_every: StateEvery = 1,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[Path | None, typer.Option(help="File for the record, such as records/evaluation.json.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a model: perplexity of a text per token and per word over windows that do not overlap, tasks, recall."""
    from slimstate.evaluation.evaluate import EvalOptions
    from slimstate.evaluation.evaluate import evaluate as measure
    from slimstate.models.options import RunOptions

    record = measure(
        model,
        text,
        tasks=tasks,
        recall=recall,
        associative=associative,
        baseline=baseline,
        options=EvalOptions(
            length=length,
            max_tokens=max_tokens,
            documents=documents,
            task_data=task_data,
            limit=limit,
            max_length=max_length,
            seed=seed,
            state_dtype=full_name(state_dtype),
            state_every=state_every,
        ),
        run=RunOptions(device=device, dtype=dtype),
        out=out,
        reporter=TerminalReporter(),
    )
    if as_json:
        print_json(record.to_json())
        return
    print_evaluation(record)
    if out is not None:
        printer().print(f"written to {out}", markup=False)


def print_evaluation(record: EvaluationRecord) -> None:
    from slimstate.evaluation.evaluate import scores_of

    console = printer()
    if record.state_dtype not in (None, "float32"):
        after = "every token" if record.state_every == 1 else f"every {record.state_every} tokens"
        size = mebibytes(record.state_bytes or 0)
        console.print(f"states kept in {record.state_dtype}, stored after {after}: {size} per sequence")
    if record.perplexity is not None:
        windows = f"{record.windows} windows of {record.length} tokens"
        per_word = f"{perplexity(record.word_perplexity, 3)} per word"
        console.print(f"perplexity {perplexity(record.perplexity, 3)} per token, {per_word} ({windows})")
        per_byte = f"{record.nats_per_byte:.4f} nats and {record.bits_per_byte:.4f} bits per byte"
        console.print(f"{record.nats_per_token:.4f} nats per token, {per_byte}: {record.counts}")
    if record.baseline is not None:
        table = Table("measure", record.name, record.baseline.name, "share kept")
        for row in record.compared:
            share = "" if row.share is None else f"{row.share:.1%}"
            table.add_row(row.measure, _number(row.model), _number(row.baseline), share)
        console.print(table)
    elif record.lm_eval is not None or record.associative_recall is not None:
        table = Table("measure", record.name)
        for name, (value, _) in scores_of(record).items():
            table.add_row(name, _number(value))
        console.print(table)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if not 1e4 <= value < HUGE else f"{value:,.0f}"


def analyze(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Model folders or hub ids.")],
    text: Annotated[str, typer.Option(help=Text.format("read"))],
    out: Annotated[Path, typer.Option(help="Folder for records and figures.")],
    length: Annotated[int, typer.Option(help="Tokens to follow the states through.")] = 1024,
    samples: Annotated[int, typer.Option(help="Texts of that length to average over.")] = 1,
    every: Annotated[int, typer.Option(help="Tokens between two looks at the states.")] = 16,
    skip: Annotated[int, typer.Option(help="First tokens that spectra and maps leave out.")] = 128,
    head: Annotated[
        str | None, typer.Option(help="LAYER:HEAD whose spectra are drawn; by default a typical one.")
    ] = None,
    documents: Documents = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """See how much of their states models use: rank utilisation, spectra, filters, the bounds of the theory."""
    from slimstate.evaluation.analyze import AnalysisOptions
    from slimstate.evaluation.analyze import analyze as look
    from slimstate.models.options import RunOptions

    found = look(
        models,
        text,
        out,
        options=AnalysisOptions(
            length=length, samples=samples, every=every, skip=skip, seed=seed, head=head, documents=documents
        ),
        run=RunOptions(device=device, dtype=dtype),
        reporter=TerminalReporter(),
    )
    if as_json:
        print_json(found.to_json())
        return
    console = printer()
    table = Table("model", "key dim", "rank utilisation", "effective rank", "states outside a bound")
    for use in found.models:
        outside = f"{use.violations} of {use.states}"
        table.add_row(use.name, str(use.key_dim), f"{use.utilisation:.3f}", f"{use.effective_rank:.2f}", outside)
    console.print(table)
    console.print(f"records and figures are in {out}; slimstate report {out} makes a page of them", markup=False)


def sweep(
    model: Model,
    text: Annotated[str, typer.Option(help=Text.format("predict"))],
    out: Annotated[
        Path, typer.Option(help="Folder for records, tables and the figure; a stopped sweep goes on there.")
    ],
    methods: Annotated[str | None, typer.Option(help="With commas between them; by default {channel_methods}.")] = None,
    compressions: Annotated[
        str | None,
        typer.Option(
            help="Shares of key channels to remove, rounded to multiples of 16; without --key-dims, by default"
            " {compressions}."
        ),
    ] = None,
    key_dims: Annotated[str | None, typer.Option(help="Channels per head to keep, exactly, such as 89,76.")] = None,
    scores: Annotated[str, typer.Option(help="Judge channels by kq, k, q: keys and queries, keys, queries.")] = "kq",
    state_dtypes: Annotated[
        str, typer.Option(help="What states are kept in, with commas between them: float32, bfloat16 or float8_e4m3.")
    ] = "float32",
    state_every: StateEvery = 1,
    data: Annotated[str | None, typer.Option(help=Text.format("calibrate on"))] = None,
    samples: CalibrationSamples = None,
    length: CalibrationLength = None,
    text_length: Annotated[int, typer.Option(help="Tokens per window of --text.")] = 1024,
    max_tokens: MaxTokens = None,
    documents: Documents = None,
    tasks: Tasks = None,
    task_data: TaskFolder = None,
    limit: Limit = None,
    max_length: MaxLength = None,
    max_loss: Annotated[float, typer.Option(help="Nats per token that a recommended cut may cost.")] = 0.1,
    seed: Seed = 0,
    rrqr_f: Annotated[float, typer.Option("--rrqr-f", help="As for prune.")] = 1.5,
    keep_norm_eps: Annotated[
        bool, typer.Option("--keep-norm-eps", help="Judge cuts that leave norm_eps alone, as prune with this flag.")
    ] = False,
    reconstruct: Annotated[
        bool, typer.Option("--reconstruct", help="Judge every cut as it is after a reconstruction on --data.")
    ] = False,
    reconstruct_steps: Steps = None,
    reconstruct_batch: Batch = None,
    reconstruct_samples: Samples = None,
    reconstruct_length: Length = 1024,
    reconstruct_learning_rate: Rate = 2e-3,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """What every method would cost at every key dim, from one calibration and without writing a model."""
    from slimstate.evaluation.sweep import SweepOptions
    from slimstate.evaluation.sweep import sweep as run
    from slimstate.evaluation.sweep_grid import SweepGrid
    from slimstate.models.options import RunOptions
    from slimstate.pruning.options import Calibration

    record = run(
        model,
        out,
        text=text,
        calibration=Calibration(data=data, documents=documents, samples=samples, length=length, seed=seed),
        grid=SweepGrid(
            methods=SweepGrid().methods if methods is None else listed(methods, "--methods", str),
            compressions=None if compressions is None else listed(compressions, "--compressions", float),
            key_dims=() if key_dims is None else listed(key_dims, "--key-dims", int),
            scores=listed(scores, "--scores", str),
            state_dtypes=listed(state_dtypes, "--state-dtypes", full_name),
        ),
        options=SweepOptions(
            text_length=text_length,
            max_tokens=max_tokens,
            documents=documents,
            tasks=tasks,
            task_data=task_data,
            limit=limit,
            max_length=max_length,
            max_loss=max_loss,
            f=rrqr_f,
            keep_norm_eps=keep_norm_eps,
            state_every=state_every,
            reconstruct=reconstruction(
                reconstruct,
                steps=reconstruct_steps,
                batch=reconstruct_batch,
                samples=reconstruct_samples,
                length=reconstruct_length,
                learning_rate=reconstruct_learning_rate,
                seed=seed,
            ),
        ),
        run=RunOptions(device=device, dtype=dtype),
        reporter=TerminalReporter(),
    )
    if as_json:
        print_json(record.to_json())
        return
    print_sweep(record, out)


def print_sweep(record: SweepRecord, out: Path) -> None:
    console, uncut, rows = printer(), record.uncut, record.rows
    keys = sorted({(row.state_bytes, row.key_dim, row.state_dtype, row.compression) for row in rows}, reverse=True)
    named = ("per token", "per word", "bits per byte", *(measure.name for measure in _tasks(uncut)))
    several = record.state_dtypes != ("float32",)
    columns = (f"key dim {key_dim} ({share:.4g}){f' {kept}' if several else ''}" for _, key_dim, kept, share in keys)
    table = Table("perplexity", "", *columns)
    for method, score in dict.fromkeys((row.method, row.score) for row in rows):
        found = {row.key[2:]: row for row in rows if (row.method, row.score) == (method, score)}
        cells = ("\n".join(_in_units(found[key[1:3]])) if key[1:3] in found else "" for key in keys)
        table.add_row(f"{method} ({score})", "\n".join(named), *cells)
    console.print(table)
    told = ", ".join(f"{value} {name}" for name, value in zip(named, _in_units(uncut), strict=True))
    console.print(f"uncut: {told}; {mebibytes(uncut.state_bytes)} of state per sequence in fp32")
    console.print(f"measured on {uncut.counts}")
    if record.settings.reconstruct is not None:
        console.print("every cut was reconstructed before it was measured")
    if (chosen := record.recommended) is not None:
        console.print(f"{'recommended: ' if chosen.within else ''}{chosen.reason}")
        console.print(f"  {chosen.command}", markup=False)
    console.print(f"records, tables and the figure are in {out}", markup=False)


def _in_units(measured: Row | Uncut) -> list[str]:
    """Perplexity per token and per word, bits per byte, and one metric of each task."""
    text = (perplexity(measured.perplexity), perplexity(measured.word_perplexity), fixed(measured.bits_per_byte, 4))
    return [*text, *(_number(measure.value) for measure in _tasks(measured))]


def _tasks(measured: Row | Uncut) -> list[Measure]:
    return [] if measured.lm_eval is None else list(measured.lm_eval.chief_measures())


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder with records of sweep, analyze, eval, verify, prune, reconstruct, recover."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The page; by default DIR/report.html.")] = None,
    as_json: Json = False,
) -> None:
    """One HTML page from whatever records are in a folder: no model is loaded, no network needed to read it."""
    from slimstate.report import write_report

    page = write_report(folder, out, reporter=TerminalReporter())
    if as_json:
        print_json(page.to_json())
        return
    found = ", ".join(f"{count} {kind}" for kind, count in page.records.items())
    printer().print(f"{page.out} ({page.bytes / 1024:.0f} KiB) from these records: {found}", markup=False)
