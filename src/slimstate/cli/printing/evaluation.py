"""The commands that measure, time, verify and report, and how their results are printed."""

from typing import TYPE_CHECKING

from slimstate.benchmark.options import CalibrateBenchConfig, DecodeBenchConfig, MixerBenchConfig, ModelBenchConfig
from slimstate.cli.commands import Command
from slimstate.cli.terminal import Printout, Table
from slimstate.records.numbers import caution, fixed, format_mib, perplexity, plural, signed, with_error
from slimstate.workflows.options import AnalyzeConfig, EvalConfig, SweepConfig, VerifyConfig

if TYPE_CHECKING:
    from slimstate.evaluation.analysis import Analysis
    from slimstate.records.benchmark import BenchRecord
    from slimstate.records.evaluation import EvaluationRecord, Row, SweepRecord, Uncut
    from slimstate.records.serving import VerificationRecord

EXIT_CODES = {"agrees": 0, "differs": 1, "refuses": 2}  # of a verification


def show_evaluation(record: "EvaluationRecord") -> Printout:
    """Yield the measures of a model, beside those of a baseline where there is one."""
    if record.state_dtype not in (None, "float32"):
        after = "every token" if record.state_every == 1 else f"every {record.state_every} tokens"
        size = format_mib(record.state_bytes or 0)
        yield f"states in {record.state_dtype}, stored after {after}: {size} per sequence"
    measures = {item.name: item for item in record.measures()}
    if record.perplexity is not None:
        windows = f"{plural(record.windows or 0, 'window')} of {record.length} tokens"
        note = ", too few for a standard error" if record.nats_error is None else "; ± is the standard error"
        value = with_error(perplexity(record.perplexity, 3), measures["perplexity"].error)
        yield f"perplexity {value} per token ({windows}{note})"
        if record.word_perplexity is not None:
            value = with_error(perplexity(record.word_perplexity, 3), measures["word perplexity"].error)
            pages = " (1 page, too few for a standard error)" if len(record.page_nats) == 1 else ""
            yield f"word perplexity {value}, as lm-eval's wikitext{pages}"
        per_byte = f"{record.nats_per_byte:.4f} nats and {record.bits_per_byte:.4f} bits per byte"
        nats = with_error(f"{record.nats_per_token:.4f}", record.nats_error)
        yield f"{nats} nats per token, {per_byte}: {record.counts}"
        yield from caution(record.tokens)
    if record.baseline is not None:
        yield Table(("measure", record.name, record.baseline.name, "share kept"), list(record.comparison()))
    elif record.lm_eval is not None or record.associative_recall is not None:
        yield Table(("measure", record.name), [(name, item.text) for name, item in measures.items()])


def show_analysis(analysis: "Analysis") -> Printout:
    """Yield how much of their states models use."""
    first, several = analysis.models[0], len(analysis.models) > 1
    over = [f"over {first.name}"] * several
    columns = ("model", "key dim", "rank utilisation", *over, "effective rank", "states outside a bound")
    rows = [
        (
            use.name, str(use.key_dim), with_error(f"{use.utilisation:.3f}", use.utilisation_error),
            *["" if use is first else signed(use.over_first, use.over_first_error)] * several,
            f"{use.effective_rank:.2f}", f"{use.violations} of {use.states}",
        )
        for use in analysis.models
    ]  # fmt: skip
    yield Table(columns, rows)
    if first.utilisation_error is None:
        yield "one text is too few for a standard error: use --samples 2 or more"
    yield f"slimstate report {analysis.out} makes a page of the records"


def show_sweep(record: "SweepRecord") -> Printout:
    """Yield a row for every method and score, a column for every key dim, and the recommended command."""
    uncut, rows = record.uncut, record.rows
    keys = sorted({(row.state_bytes, row.dims, row.state_dtype, row.compression) for row in rows}, reverse=True)
    several = record.state_dtypes != ("float32",)
    columns = (f"key dim {dims} ({share:.4g}){f' {dtype}' if several else ''}" for _, dims, dtype, share in keys)
    lines, scores = [], {row.score for row in rows}
    for method, score in dict.fromkeys((row.method, row.score) for row in rows):
        by_key = {row.key[2:]: _in_units(row, uncut) for row in rows if (row.method, row.score) == (method, score)}
        for place, unit in enumerate(_in_units(uncut, uncut)):
            cells = (by_key.get(key[1:3], {}).get(unit, "") for key in keys)
            label = method if scores == {"kq"} else f"{method} ({score})"
            lines.append(("" if place else label, unit, *cells))
    yield Table(("method", "", *columns), lines)
    values = ", ".join(f"{value} {name}" for name, value in list(_in_units(uncut, uncut).items())[:-1])
    yield f"uncut: {values}; {format_mib(uncut.state_bytes)} of state per sequence in fp32"
    yield f"measured on {uncut.counts}"
    yield from caution(uncut.tokens)
    if record.settings.reconstruct is not None:
        yield "every cut was reconstructed before it was measured"
    if (recommended := record.recommended) is not None:
        yield recommended.line()
        if recommended.command is not None:
            yield f"  {recommended.command}"


def _in_units(result: "Row | Uncut", uncut: "Uncut") -> dict[str, str]:
    """Return perplexity per token, of WikiText also per word, bits per byte, and other scores with their changes."""
    texts = {"per token": perplexity(result.perplexity)}
    if result.word_perplexity is not None:
        texts["per word"] = perplexity(result.word_perplexity)
    texts["bits per byte"] = fixed(result.bits_per_byte, 4)
    before = {item.name: item.value for item in uncut.measures(main=True)}
    for item in result.measures(main=True):
        texts[item.name] = item.text
        if result is not uncut and item.value is not None and (value := before.get(item.name)) is not None:
            error = getattr(result, "recall_error", None) if item.group == "recall" else None
            texts[item.name] += f", {signed(item.value - value, error, none=' (none)')}"
    loss, error = getattr(result, "nats_over_uncut", 0.0), getattr(result, "nats_error", None)
    return {**texts, "nats over uncut": signed(loss, error, none=" (none)")}


def show_verification(record: "VerificationRecord") -> Printout:
    yield record.verdict
    if record.outcome.differences is not None:
        yield f"the difference is the {record.measure}; tolerance {record.tolerance:g}, {record.dtype}"


def show_bench(record: "BenchRecord") -> Printout:
    from slimstate.benchmark.tables import table
    from slimstate.records.benchmark import DecodeRecord, KernelRecord

    yield Table(*table(record))
    if isinstance(record, DecodeRecord | KernelRecord):
        yield f"copying: {record.copy_bandwidth / 1e9:,.0f} GB/s, read and written"
    if isinstance(record, DecodeRecord):
        for entry in record.largest_batch:
            if entry.batch is not None:
                yield entry.line


COMMANDS = (
    Command(name="eval", config=EvalConfig, show=show_evaluation),
    Command(name="analyze", config=AnalyzeConfig, show=show_analysis),
    Command(name="sweep", config=SweepConfig, show=show_sweep),
    Command(name="report"),
    Command(
        name="verify", config=VerifyConfig, show=show_verification,
        exit_code=lambda record: EXIT_CODES[record.outcome.verdict],
    ),
    Command(name="bench mixer", config=MixerBenchConfig, show=show_bench),
    Command(name="bench model", config=ModelBenchConfig, show=show_bench),
    Command(name="bench decode", config=DecodeBenchConfig, show=show_bench),
    Command(name="bench calibrate", config=CalibrateBenchConfig, show=show_bench),
)  # fmt: skip
