"""The commands that measure, verify and report, and how their results are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimstate.cli.commands import Command
from slimstate.cli.terminal import printer
from slimstate.records.numbers import format_mib
from slimstate.workflows.analyze import AnalyzeConfig, analyze
from slimstate.workflows.evaluate import EvalConfig, evaluate
from slimstate.workflows.report import report
from slimstate.workflows.sweep import SweepConfig, sweep
from slimstate.workflows.verify import VerifyConfig, verify

if TYPE_CHECKING:
    from slimstate.evaluation.analysis import Analysis
    from slimstate.records.evaluation import EvaluationRecord, Measure, Row, SweepRecord, Uncut
    from slimstate.records.serving import VerificationRecord
    from slimstate.report import WrittenReport

EXIT_CODES = {"agrees": 0, "differs": 1, "refuses": 2}  # of a verification


def show_evaluation(record: EvaluationRecord) -> None:
    """Print the measures of a model, beside those of a baseline where there is one."""
    from rich.table import Table

    from slimstate.records.numbers import perplexity

    console = printer()
    if record.state_dtype not in (None, "float32"):
        after = "every token" if record.state_every == 1 else f"every {record.state_every} tokens"
        size = format_mib(record.state_bytes or 0)
        console.print(f"states in {record.state_dtype}, stored after {after}: {size} per sequence")
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
        console.print(table, soft_wrap=False)
    elif record.lm_eval is not None or record.associative_recall is not None:
        table = Table("measure", record.name)
        for measure in record.measures():
            table.add_row(measure.name, _number(measure.value))
        console.print(table, soft_wrap=False)
    if record.out is not None:
        console.print(f"written to {record.out}")


def show_analysis(analysis: Analysis) -> None:
    """Print how much of their states models use."""
    from rich.table import Table

    console = printer()
    table = Table("model", "key dim", "rank utilisation", "effective rank", "states outside a bound")
    for use in analysis.models:
        outside = f"{use.violations} of {use.states}"
        table.add_row(use.name, str(use.key_dim), f"{use.utilisation:.3f}", f"{use.effective_rank:.2f}", outside)
    console.print(table, soft_wrap=False)
    out = analysis.out
    console.print(f"records and figures are in {out}; slimstate report {out} makes a page of them")


def show_sweep(record: SweepRecord) -> None:
    """Print a row for every method and score, a column for every key dim, and the recommended command."""
    from rich.table import Table

    console, uncut, rows = printer(), record.uncut, record.rows
    keys = sorted({(row.state_bytes, row.key_dim, row.state_dtype, row.compression) for row in rows}, reverse=True)
    units = ("per token", "per word", "bits per byte", *(measure.name for measure in _tasks(uncut)))
    several = record.state_dtypes != ("float32",)
    columns = (f"key dim {key_dim} ({share:.4g}){f' {dtype}' if several else ''}" for _, key_dim, dtype, share in keys)
    table = Table("perplexity", "", *columns)
    for method, score in dict.fromkeys((row.method, row.score) for row in rows):
        by_key = {row.key[2:]: row for row in rows if (row.method, row.score) == (method, score)}
        cells = ("\n".join(_in_units(by_key[key[1:3]])) if key[1:3] in by_key else "" for key in keys)
        table.add_row(f"{method} ({score})", "\n".join(units), *cells)
    console.print(table, soft_wrap=False)
    values = ", ".join(f"{value} {name}" for name, value in zip(units, _in_units(uncut), strict=True))
    console.print(f"uncut: {values}; {format_mib(uncut.state_bytes)} of state per sequence in fp32")
    console.print(f"measured on {uncut.counts}")
    if record.settings.reconstruct is not None:
        console.print("every cut was reconstructed before it was measured")
    if (recommended := record.recommended) is not None:
        console.print(f"{'recommended: ' if recommended.within else ''}{recommended.reason}")
        console.print(f"  {recommended.command}")
    console.print(f"records, tables and the figure are in {record.out}")


def show_report(page: WrittenReport) -> None:
    """Print where a page is and what it is made from."""
    records = ", ".join(f"{count} {kind}" for kind, count in page.records.items())
    printer().print(f"{page.out} ({page.bytes / 1024:.0f} KiB) from these records: {records}")


def _in_units(measured: Row | Uncut) -> list[str]:
    """Return perplexity per token and per word, bits per byte, and one metric of each task."""
    from slimstate.records.numbers import fixed, perplexity

    text = (perplexity(measured.perplexity), perplexity(measured.word_perplexity), fixed(measured.bits_per_byte, 4))
    return [*text, *(_number(measure.value) for measure in _tasks(measured))]


def _tasks(measured: Row | Uncut) -> list[Measure]:
    return [] if measured.lm_eval is None else list(measured.lm_eval.chief_measures())


def _number(value: float | None) -> str:
    from slimstate.records.numbers import HUGE

    if value is None:
        return ""
    return f"{value:.4g}" if not 1e4 <= value < HUGE else f"{value:,.0f}"


def show_verification(record: VerificationRecord) -> None:
    """Print the verdict, and what the difference is measured in."""
    console = printer()
    console.print(record.verdict)
    console.print(f"the difference is the {record.measure}; tolerance {record.tolerance:g}, {record.dtype}")
    if "out" in record.config:
        console.print(f"written to {record.config['out']}")


COMMANDS = (
    Command(name="eval", workflow=evaluate, config=EvalConfig, show=show_evaluation),
    Command(name="analyze", workflow=analyze, config=AnalyzeConfig, show=show_analysis),
    Command(name="sweep", workflow=sweep, config=SweepConfig, show=show_sweep),
    Command(name="report", workflow=report, show=show_report),
    Command(
        name="verify", workflow=verify, config=VerifyConfig, show=show_verification,
        exit_code=lambda record: EXIT_CODES[record.outcome.verdict],
    ),
)  # fmt: skip
