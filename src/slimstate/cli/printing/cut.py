"""The commands that look at a model and cut it, and how their results are printed."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import slimstate
from slimstate.cli import name_flags
from slimstate.cli.commands import Command, HubFlags
from slimstate.cli.terminal import Detail, Printout, Table
from slimstate.records.numbers import format_mib, plural
from slimstate.system.errors import MAX_LINE, PlanError, quoted
from slimstate.system.options import once
from slimstate.system.progress import Reporter
from slimstate.workflows.options import InspectConfig, PruneConfig, ReconstructConfig

if TYPE_CHECKING:
    from slimstate.records.cut import CutRecord, EstimateRecord, InspectionRecord
    from slimstate.records.serving import Gain, PoolRecord
    from slimstate.records.training import ReconstructionRecord

KIB, MIB = 2**10, 2**20


class PruneFlags(HubFlags):
    """Output"""

    dry_run: bool = once()
    """Choose channels, write nothing."""
    plan_only: bool = once()
    """Estimate time and memory; load nothing, write nothing."""


def run_prune(
    model: str, config: PruneConfig, flags: PruneFlags, reporter: Reporter, out: str | None = None
) -> "CutRecord | EstimateRecord":
    if out is None and not (flags.dry_run or flags.plan_only):
        raise PlanError("give `out`, or `dry_run` to write nothing")
    if flags.dry_run and flags.plan_only:
        raise PlanError("`plan_only` estimates and `dry_run` chooses channels: leave out one of them")
    if flags.dry_run and config.reconstruct is not None:
        raise PlanError("`reconstruct` trains what is written: leave out `dry_run`")
    if flags.push_to_hub is not None and (flags.dry_run or flags.plan_only):
        raise PlanError("`push_to_hub` uploads what is written: leave out `dry_run` and `plan_only`")
    workflow: Callable[..., CutRecord | EstimateRecord] = slimstate.estimate if flags.plan_only else slimstate.prune
    return workflow(model, None if flags.dry_run else out, config, progress=reporter)


def show_inspection(record: "InspectionRecord | PoolRecord") -> Printout:
    """Yield the state of a model and the key dims worth choosing, or what fits into the memory of an engine."""
    from slimstate.records.serving import PoolRecord
    from slimstate.serving.engines import Rule

    if isinstance(record, PoolRecord):
        yield from _show_pool(record)
        return
    yield record.headline()
    if (cut := record.already_cut) is not None:
        yield f"cut before: {cut}"
    columns = ("key dim", "compression", "state fp32", "state bf16", "sequences in the same memory", "parameters")
    rows = [
        (
            str(option.key_dim), f"{option.compression:.3g}", format_mib(option.state_bytes["fp32"]),
            format_mib(option.state_bytes["bf16"]),
            f"{option.sequences:.2f}x", "" if option.parameters is None else f"{option.parameters:,}",
        )
        for option in record.options
    ]  # fmt: skip
    if rows:
        yield Table(columns, rows)
    if record.gains:
        yield from _show_gains(record.gains)
    yield name_flags(record.sides)
    if record.budget is not None:
        yield record.budget.why
    if record.speed:
        yield record.speed.advice
    yield from (f"serving: {name_flags(verdict)}" for verdict in record.serving.verdicts)
    yield from (Detail(f"  {Rule(**rule).describe(condition=True)}") for rule in record.serving.rules)


def _show_gains(gains: Sequence["Gain"]) -> Printout:
    """Yield what half of the key dim gains at each context, and where a cut pays."""
    *_, last = gains
    cards = f"{last.card}, weights in bf16, states in {last.state_dtype}"
    yield f"what key dim {last.key_dim} gains on {cards}, an estimate (within 17% for the DeltaNets that were timed):"
    pairs = [(row.context, row.sequences, row.tokens_per_second) for row in gains]
    rows = [(f"{context:,}" if context else "any", *map(_change, numbers)) for context, *numbers in pairs]
    yield Table(("context", "sequences that fit", "tokens per second of all"), rows)
    if not last.context:
        yield "there is no KV cache: a cut gains the same at every context, and most with many sequences at once"
        return
    little = "little" if last.sequences[1] < 1.1 * last.sequences[0] else "less"
    yield (
        f"{little} is gained at {last.context:,} tokens, where {int(100 * (1 - last.state_share))}% of a sequence is KV"
        " cache, which stays; a cut pays with short contexts, many sequences and prefix caching, whose pages are states"
    )


def _change(pair: Sequence[float]) -> str:
    return f"{pair[0]:,.0f} to {pair[1]:,.0f} ({pair[1] / pair[0]:.2f}x)"


def _show_pool(record: "PoolRecord") -> Printout:
    """Yield how many sequences fit into the memory of an engine at every key dim."""
    yield record.headline()
    rows = []
    for row in record.rows:
        pages, share = row.pages, row.share
        cells = {"key dim": str(row.key_dim), "sequences": f"{row.sequences:,.2f}"}
        cells["gain"] = "" if row.gain is None else f"{row.gain:.2f}x"
        cells |= {"state KiB": f"{pages.state / KIB:,.0f}", "convolution KiB": f"{pages.convolution / KIB:,.0f}"}
        if pages.block is not None:
            cells |= {"block, tokens": f"{pages.block:,}", "page KiB": f"{(pages.page or 0) / KIB:,.0f}"}
        cells |= {"states MiB": f"{share.states / MIB:,.1f}", "keys and values MiB": f"{share.attention / MIB:,.1f}"}
        cells |= {"kept prefixes": f"{row.cached:,.2f}"} if row.cached is not None else {}
        rows.append(cells | ({"runs out": row.limit} if row.limit is not None else {}))
    columns = list(rows[0])
    yield Table(columns, [[cells.get(name, "") for name in columns] for cells in rows])
    yield "state, convolution and page are of one layer; states, keys and values of one sequence"
    if "kept prefixes" in columns:
        yield "kept prefixes: whole sequences whose states are stored at every block"


def show_prune(record: "CutRecord | EstimateRecord") -> Printout:
    """Yield what a cut changed, or what it would take."""
    from slimstate.records.cut import EstimateRecord

    if isinstance(record, EstimateRecord):
        yield from _show_estimate(record)
        return
    yield record.headline()
    certificate = record.certificate
    facts = ("kernels: none ran" if record.kernels is None else None, record.correction)
    yield from (Detail(fact) for fact in facts if fact is not None)
    if (rho := certificate.get("rho")) is not None:
        swaps = plural(int(certificate.get("swaps") or 0), "swap")
        yield Detail(f"largest rho left: {rho:.3f} after {swaps}")
    if (lost := certificate.get("variance_lost")) is not None:
        yield Detail(f"most variance that a head loses: {lost:.2%}")
    if "condition_after" in certificate:
        numbers = (certificate.get("condition_before"), certificate["condition_after"])
        before, after = ("singular" if number is None else f"{number:.3g}" for number in numbers)
        yield Detail(f"worst condition number of a head's keys: {before} before, {after} after")
    if record.left_out:
        yield f"left out, because they hold other weights: {quoted(', '.join(record.left_out), MAX_LINE)}"
    if record.reconstruction is not None:
        yield from show_reconstruction(record.reconstruction)
    yield from () if record.evaluation is None else record.evaluation.summary()
    if record.out is None:
        yield "dry run: nothing was written"


def _show_estimate(record: "EstimateRecord") -> Printout:
    calibrated = f", {record.tokens:,} tokens on {record.device} in {record.dtype}" if record.tokens else ""
    yield f"{record.method} to key dim {record.key_dim}{calibrated}: about"
    for stage, seconds in record.seconds.items():
        yield f"  {seconds:,.1f} s  {stage}"
    for sizes, title in ((record.gpu_bytes, "GPU memory"), (record.host_bytes, "host memory")):
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items() if name != "total")
        if sizes["total"]:
            yield f"  {sizes['total'] / 2**30:.2f} GiB  {title}: {parts}"
    yield f"  {record.disk_bytes / 2**30:.2f} GiB  on disk, at most"
    yield "nothing was loaded or written; expect errors up to a factor of two"


def show_reconstruction(record: "ReconstructionRecord") -> Printout:
    improved = len(record.trainable) - len(record.unimproved)
    yield (
        f"reconstructed {improved} of {plural(len(record.trainable), 'layer')}; mean error on"
        f" {plural(record.held_out, 'held-out window')}: {record.error_before:.4f} to {record.error_after:.4f}"
    )
    yield from record.notes()
    if record.distillation is not None:
        yield record.distillation.line()
    yield from () if record.evaluation is None else record.evaluation.summary()


COMMANDS = (
    Command(name="inspect", config=InspectConfig, show=show_inspection),
    Command(name="prune", config=PruneConfig, show=show_prune, flags=PruneFlags, run=run_prune),
    Command(name="reconstruct", config=ReconstructConfig, show=show_reconstruction, flags=HubFlags),
)
