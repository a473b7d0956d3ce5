"""The commands that train, and how their results are printed."""

from typing import TYPE_CHECKING

import slimstate
from slimstate.cli.commands import Command, HubFlags
from slimstate.cli.terminal import Printout, Table
from slimstate.records.numbers import fixed, perplexity, plural
from slimstate.system.errors import PlanError
from slimstate.system.options import once
from slimstate.system.progress import Reporter
from slimstate.workflows.options import RecoverConfig, TrainConfig

if TYPE_CHECKING:
    from slimstate.records.training import RecoveryRecord, TrainingRunRecord
    from slimstate.training.recover import Preview

STAGES = {"before": "before", "after": "after", "uncut": "uncut", "control": "uncut, same training"}


class RecoverFlags(HubFlags):
    """Output"""

    dry_run: bool = once()
    """List what would be trained; train nothing, write nothing."""


def run_recover(
    model: str, config: RecoverConfig, flags: RecoverFlags, reporter: Reporter, out: str | None = None
) -> "RecoveryRecord | Preview":
    if flags.dry_run:
        if flags.push_to_hub is not None:
            raise PlanError("`push_to_hub` uploads what is written: leave out `dry_run`")
        return slimstate.preview(model, config, progress=reporter)
    if out is None or config.text.data is None:
        raise PlanError("give `data` and `out`, or `dry_run` to train nothing")
    return slimstate.recover(model, out, config, progress=reporter)


def show_recovery(record: "RecoveryRecord | Preview") -> Printout:
    """Yield what was trained and measured, or what would be trained."""
    from slimstate.training.recover import Preview

    if not isinstance(record, Preview):
        yield from show_training(record)
        return
    for title, names in (("adapters on", record.targets), ("trained whole", (*record.convolutions, *record.unfrozen))):
        if names:
            yield f"{title}:"
        yield from (f"  {name}" for name in names)
    if record.settings.full:
        yield "all weights are trained"
    if record.settings.mixers:
        yield "the mixers are trained whole"
    beside = f"parameters to train beside the {record.parameters:,} of the model"
    yield f"{record.trained_parameters:,} {beside if record.targets else f'of {record.parameters:,} parameters'}"
    yield f"{plural(record.steps, 'step')}, {record.tokens:,} tokens; dry run: nothing was trained"


def show_training(record: "TrainingRunRecord") -> Printout:
    """Yield how well the model predicts the text before and after, and how fast it was trained."""
    measured = record.measured
    yield f"{measured.counts}: {measured.text}"
    is_teacher = getattr(record, "control_teaches", False)
    titles = STAGES | ({"control": "uncut, trained: the teacher"} if is_teacher else {})
    rows = [
        (
            titles[name], measured.nats_text(name), perplexity(measured.perplexity[name]),
            perplexity(measured.word_perplexity.get(name)), fixed(measured.bits_per_byte[name], 4),
            *[measured.recall_text(name)] * bool(measured.recall),
        )
        for name in measured.nats.by_name()
    ]  # fmt: skip
    recall = ["recall"] * bool(measured.recall)
    yield Table(("", "nats per token", "perplexity per token", "per word", "bits per byte", *recall), rows)
    yield f"after the training: {measured.gain}"
    yield from measured.gaps({"uncut": "the uncut model", "control": "the control"})
    if record.tokens_per_second:
        yield f"{record.tokens:,} tokens at {record.tokens_per_second:,.0f} tokens/s"


COMMANDS = (
    Command(name="recover", config=RecoverConfig, show=show_recovery, flags=RecoverFlags, run=run_recover),
    Command(name="train", config=TrainConfig, show=show_training, metavar="CONFIG"),
)
