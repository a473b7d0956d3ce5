"""Reconstruction: what every cut layer gives beside the uncut one, before and after it was trained."""

from __future__ import annotations

from collections.abc import Sequence

from slimstate.records.folder import Found
from slimstate.records.reconstruction import ReconstructionRecord
from slimstate.report import plots
from slimstate.report.markup import Html, joined
from slimstate.report.numbers import fixed, percent
from slimstate.report.pieces import Cell, Section, drawing, figure, sortable

CAPTION = (
    "The squared error behind each mixer, relative to what the mixer adds to the residual stream: a mean over layers, "
    "on windows that were trained on and on those held out. Less is better; 0 is the uncut layer."
)


def reconstruction_section(found: Sequence[Found[ReconstructionRecord]]) -> Section | None:
    if not found:
        return None
    records = [each.record for each in found]
    picture = drawing(plots.layer_errors(records), "reconstruction", "Error of every layer before and after")
    drawn = figure(picture, "Each layer on windows that were held out: a ring for the cut, a dot for what it became.")
    return Section(anchor="reconstruction", title="Reconstruction", body=joined([outcome_table(records), drawn]))


def outcome_table(records: Sequence[ReconstructionRecord]) -> Html:
    columns = ["model", "text", "steps a layer", "layers", "trained on, cut", "after", "held out, cut", "after", "gone"]
    return sortable(CAPTION, columns, [(outcome_cells(record), {}) for record in records])


def outcome_cells(record: ReconstructionRecord) -> list[Cell]:
    improved, layers = sum(layer.step > 0 for layer in record.layers), len(record.layers)
    tokens = record.settings.samples * record.settings.length
    before, after = (sum(getattr(layer, name) for layer in record.layers) / layers for name in ("before", "after"))
    share = 1 - record.error_after / record.error_before if record.error_before else 0.0
    return [
        Cell(shown=plots.label_of(record)),
        Cell(shown=f"{tokens:,} tokens", value=tokens, numeric=True),
        Cell(shown=str(record.settings.steps), value=record.settings.steps, numeric=True),
        Cell(shown=f"{improved} of {layers}", value=improved, numeric=True),
        *(Cell(shown=fixed(error, 4), value=error, numeric=True) for error in (before, after)),
        *(
            Cell(shown=fixed(error, 4), value=error, numeric=True)
            for error in (record.error_before, record.error_after)
        ),
        Cell(shown=percent(share), value=share, numeric=True),
    ]
