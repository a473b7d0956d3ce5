"""Recovery: what fine-tuning gave back, beside the uncut model and the control."""

from __future__ import annotations

from collections.abc import Sequence

from slimstate.records.folder import Found
from slimstate.records.training import RecoveryRecord, RecoverySettings
from slimstate.report import plots
from slimstate.report.evaluation import few_tokens, share_cell
from slimstate.report.markup import Html, joined
from slimstate.report.numbers import UNKNOWN, fixed
from slimstate.report.pieces import Cell, Section, drawing, figure, sortable

STAGES = ("before", "after", "uncut", "control")
CAPTION = (
    "Nats per token on text that was not trained on: less is better. The control is the uncut model after the same "
    "training (without a teacher, where it then taught); “closed” is how much of the gap between the cut model and the "
    "control (without one, the uncut model) is gone."
)


def recovery_section(recoveries: Sequence[Found[RecoveryRecord]]) -> Section | None:
    if not recoveries:
        return None
    records = [found.record for found in recoveries]
    body = joined(
        [
            outcome_table(records),
            few_tokens(min(record.measured.tokens for record in records), "closed"),
            loss_figure(records),
        ]
    )
    return Section(anchor="recovery", title="Recovery", body=body)


def outcome_table(records: Sequence[RecoveryRecord]) -> Html:
    columns = ["model", "tokens", "trained", *STAGES, "closed"]
    return sortable(CAPTION, columns, [(outcome_cells(record), {}) for record in records])


def outcome_cells(record: RecoveryRecord) -> list[Cell]:
    nats, closed = record.measured.nats, record.measured.closed
    return [
        Cell(shown=plots.label_of(record)),
        Cell(shown=f"{record.tokens:,}", value=record.tokens, numeric=True),
        Cell(shown=trained_parts(record.settings)),
        *map(nats_cell, (nats.before, nats.after, nats.uncut, nats.control)),
        share_cell(closed.get("control", closed.get("uncut"))),
    ]


def trained_parts(settings: RecoverySettings) -> str:
    if settings.adaptation.full:
        return "all weights"
    if settings.adaptation.mixers:
        return "the mixers"
    return ", ".join(("adapters", "convolutions", *(settings.unfreeze.split(",") if settings.unfreeze else ())))


def nats_cell(nats: float | None) -> Cell:
    return Cell(shown=UNKNOWN if nats is None else fixed(nats, 4), value="" if nats is None else nats, numeric=True)


def loss_figure(records: Sequence[RecoveryRecord]) -> Html | None:
    able = [record for record in records if record.log]
    if not able:
        return None
    picture = drawing(plots.loss_curves(able), "recovery", "Training loss against tokens")
    return figure(picture, "The training loss, smoothed: cross entropy plus, with a teacher, the distillation.")
