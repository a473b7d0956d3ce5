"""The commands that train, and how their results are printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimstate.cli.commands import Command, HubFlags
from slimstate.cli.terminal import printer
from slimstate.system.errors import PlanError
from slimstate.system.options import once
from slimstate.system.progress import Reporter
from slimstate.workflows.recover import RecoverConfig, preview, recover
from slimstate.workflows.train import TrainConfig, train

if TYPE_CHECKING:
    from slimstate.records.training import RecoveryRecord, TrainingRunRecord
    from slimstate.training.recover import Preview

STAGES = {"before": "before", "after": "after", "uncut": "uncut", "control": "uncut, same training"}
CONTROL_TEACHES = "uncut, trained: the teacher"


@dataclass(frozen=True, kw_only=True)
class RecoverFlags(HubFlags):
    """Output"""

    dry_run: bool = once()
    """List what would be trained; train nothing, write nothing."""


def run_recover(
    model: str, config: RecoverConfig, flags: RecoverFlags, reporter: Reporter, out: str | None = None
) -> RecoveryRecord | Preview:
    """Recover a model, or describe what that trains."""
    if flags.dry_run:
        if flags.push_to_hub is not None:
            raise PlanError("`push_to_hub` uploads what is written: leave out `dry_run`")
        return preview(model, config, progress=reporter)
    if out is None or config.text.data is None:
        raise PlanError("give `data` and `out`, or `dry_run` to train nothing")
    return recover(model, out, config, progress=reporter)


def show_recovery(record: RecoveryRecord | Preview) -> None:
    """Print what was trained and measured, or what would be trained."""
    from slimstate.training.recover import Preview

    if isinstance(record, Preview):
        _show_preview(record)
    else:
        show_training(record)


def _show_preview(record: Preview) -> None:
    console = printer()
    for title, names in (("adapters on", record.targets), ("trained whole", (*record.convolutions, *record.unfrozen))):
        if names:
            console.print(f"{title}:")
        for name in names:
            console.print(f"  {name}", markup=False)
    if record.settings.full:
        console.print("all weights are trained")
    if record.settings.mixers:
        console.print("the mixers are trained whole")
    if record.targets:
        console.print(
            f"{record.trained_parameters:,} parameters to train beside the {record.parameters:,} of the model"
        )
    else:
        console.print(f"{record.trained_parameters:,} of {record.parameters:,} parameters")
    console.print(f"{record.steps:,} steps, {record.tokens:,} tokens; dry run: nothing was trained")


def show_training(record: TrainingRunRecord) -> None:
    """Print how well the model predicts the text before and after, and how fast it was trained."""
    from rich.table import Table

    from slimstate.records.numbers import fixed, perplexity

    console, measured = printer(), record.measured
    size = f"{measured.tokens:,} tokens, {measured.words:,} words, {measured.bytes:,} bytes"
    columns = ("", "nats per token", "perplexity per token", "per word", "bits per byte")
    table = Table(*columns, title=f"{size}: {measured.text}")
    titles = {**STAGES, "control": CONTROL_TEACHES} if getattr(record, "control_teaches", False) else STAGES
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


COMMANDS = (
    Command(
        name="recover", workflow=recover, config=RecoverConfig, show=show_recovery, flags=RecoverFlags, run=run_recover
    ),
    Command(name="train", workflow=train, config=TrainConfig, show=show_training, metavar="CONFIG"),
)
