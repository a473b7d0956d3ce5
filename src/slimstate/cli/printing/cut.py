"""The commands that look at a model and cut it, and how their results are printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slimstate.cli.commands import Command, HubFlags
from slimstate.cli.terminal import printer
from slimstate.records.numbers import format_mib
from slimstate.system.errors import MAX_LINE, PlanError, quoted
from slimstate.system.options import once
from slimstate.system.progress import Reporter
from slimstate.workflows.inspect import InspectConfig, inspect
from slimstate.workflows.prune import PruneConfig, estimate, prune
from slimstate.workflows.reconstruct import ReconstructConfig, reconstruct

if TYPE_CHECKING:
    from slimstate.records.cut import CutRecord, EstimateRecord, InspectionRecord
    from slimstate.records.serving import PoolRecord
    from slimstate.records.training import ReconstructionRecord

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, kw_only=True)
class PruneFlags(HubFlags):
    """Output"""

    dry_run: bool = once()
    """Choose channels, write nothing."""
    plan_only: bool = once()
    """Estimate time and memory; load nothing, write nothing."""


def run_prune(
    model: str, config: PruneConfig, flags: PruneFlags, reporter: Reporter, out: str | None = None
) -> CutRecord | EstimateRecord:
    """Cut a model, or estimate what that takes."""
    if out is None and not (flags.dry_run or flags.plan_only):
        raise PlanError("give `out`, or `dry_run` to write nothing")
    if flags.push_to_hub is not None and (flags.dry_run or flags.plan_only):
        raise PlanError("`push_to_hub` uploads what is written: leave out `dry_run` and `plan_only`")
    workflow: Any = estimate if flags.plan_only else prune
    result: CutRecord | EstimateRecord = workflow(model, None if flags.dry_run else out, config, progress=reporter)
    return result


def show_inspection(record: InspectionRecord | PoolRecord) -> None:
    """Print the state of a model and the key dims worth choosing, or what fits into the memory of an engine."""
    from rich.table import Table

    from slimstate.records.serving import PoolRecord
    from slimstate.serving.engines import rules_of

    if isinstance(record, PoolRecord):
        show_pool(record)
        return
    console = printer()
    console.print(record.headline())
    if (cut := record.already_cut) is not None:
        console.print(f"cut before: key dim {cut.width} to {cut.key_dim} by {cut.method}")
    table = Table("key dim", "compression", "state fp32", "state bf16", "sequences in the same memory", "parameters")
    for option in record.options:
        sizes = [format_mib(option.state_bytes[dtype]) for dtype in ("fp32", "bf16")]
        parameters = "" if option.parameters is None else f"{option.parameters:,}"
        table.add_row(
            str(option.key_dim), f"{option.compression:.3g}", *sizes, f"{option.sequences:.2f}x", parameters
        )  # fmt: skip
    console.print(table, soft_wrap=False)
    if record.budget is not None:
        console.print(record.budget.why)
    if record.speed:
        console.print(record.speed.advice)
    rules = rules_of(record.model_type, record.serving.engine)
    console.print(f"serving, as of {record.serving.date}:" if rules else "serving: no engine was examined")
    for rule in rules:
        console.print(f"  {rule.describe(condition=True)}")
    if record.serving.advice is not None:
        console.print(record.serving.advice)


def show_pool(record: PoolRecord) -> None:
    """Print how many sequences fit into the memory of an engine at every key dim."""
    from rich.table import Table

    console = printer()
    if not console.is_terminal:
        console.width = 200
    cards = "" if record.tensor_parallel == 1 else f" on each of {record.tensor_parallel} GPUs"
    layers = f"{record.linear_layers} linear and {record.softmax_layers} softmax layers"
    dtypes = f"states in {record.state_dtype}, keys and values in {record.kv_dtype}"
    console.print(f"{record.model}: {record.model_type}, {layers}")
    memory = f"{record.memory_bytes / 2**30:g} GiB for states and caches{cards}"
    prefixes = ", prefix caching" if record.prefix_caching else ""
    console.print(f"{record.engine}: {memory}, sequences of {record.context:,} tokens{prefixes}; {dtypes}")
    first = record.rows[0]
    blocks, prefix_caching, limited = first.pages.block is not None, first.cached is not None, first.limit is not None
    columns = ["key dim", "sequences", "gain", "state KiB", "convolution KiB"]
    columns += ["block, tokens", "page KiB"] * blocks + ["states MiB", "keys and values MiB"]
    table = Table(*columns, *["kept prefixes"] * prefix_caching, *["runs out"] * limited)
    for row in record.rows:
        pages, share = row.pages, row.share
        cells = [str(row.key_dim), f"{row.sequences:,.2f}", "" if row.gain is None else f"{row.gain:.2f}x"]
        cells += [f"{pages.state / KIB:,.0f}", f"{pages.convolution / KIB:,.0f}"]
        cells += [f"{pages.block:,}", f"{(pages.page or 0) / KIB:,.0f}"] if blocks else []
        cells += [f"{share.states / MIB:,.1f}", f"{share.attention / MIB:,.1f}"]
        cells += [f"{row.cached:,.2f}"] if row.cached is not None else []
        table.add_row(*cells, *[row.limit or ""] * limited)
    console.print(table, soft_wrap=False)
    console.print("state, convolution and page are of one layer; states, keys and values of one sequence")
    if prefix_caching:
        console.print("kept prefixes: whole sequences whose states are stored at every block")


def show_prune(record: CutRecord | EstimateRecord) -> None:
    """Print what a cut changed, or what it would take."""
    from slimstate.records.cut import EstimateRecord

    if isinstance(record, EstimateRecord):
        _show_estimate(record)
        return
    console = printer()
    if record.kernels is None:
        console.print("kernels: none ran")
    console.print(record.headline())
    for line in _certificate_lines(record.certificate):
        console.print(line)
    if record.left_out:
        console.print(f"left out, because they hold other weights: {quoted(', '.join(record.left_out), MAX_LINE)}")
    if record.reconstruction is not None:
        _show_errors(record.reconstruction)
    console.print(f"written to {record.out}" if record.out else "dry run: nothing was written")


def _certificate_lines(certificate: Mapping[str, float | None]) -> Iterator[str]:
    if "rho" in certificate:
        yield f"largest rho left: {certificate['rho']:.3f} after {certificate['swaps']:.0f} swaps"
    if "variance_lost" in certificate:
        yield f"most variance that a head loses: {certificate['variance_lost']:.2%}"
    if "condition_after" in certificate:
        before, after = (
            "singular" if value is None else f"{value:.3g}"
            for value in (certificate["condition_before"], certificate["condition_after"])
        )
        yield f"worst condition number of a head's keys: {before} before, {after} after"


def _show_estimate(record: EstimateRecord) -> None:
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
    console.print("nothing was loaded or written; expect errors up to a factor of two")


def show_reconstruction(record: ReconstructionRecord) -> None:
    """Print the errors before and after a reconstruction."""
    _show_errors(record)
    printer().print(f"written to {record.out}")


def _show_errors(record: ReconstructionRecord) -> None:
    improved = sum(layer.step > 0 for layer in record.layers)
    printer().print(
        f"reconstructed {improved} of {len(record.layers)} layers; their mean error on {record.held_out} held-out"
        f" windows: {record.error_before:.4f} to {record.error_after:.4f}"
    )
    if record.distillation is not None:
        printer().print(record.distillation.line())


COMMANDS = (
    Command(name="inspect", workflow=inspect, config=InspectConfig, show=show_inspection),
    Command(name="prune", workflow=prune, config=PruneConfig, show=show_prune, flags=PruneFlags, run=run_prune),
    Command(
        name="reconstruct", workflow=reconstruct, config=ReconstructConfig, show=show_reconstruction, flags=HubFlags
    ),
)
