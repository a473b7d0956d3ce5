"""Serving: what engines made of a model, beside transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slimstate.records.folder import Found
from slimstate.records.verification import MEASURE, Outcome, VerificationRecord
from slimstate.report import plots
from slimstate.report.markup import Html, element
from slimstate.report.numbers import UNKNOWN
from slimstate.report.pieces import Cell, Section, sortable

COLUMNS = ("engine", "model", "verdict", "prefill", "decoding", "greedy tokens the same", "the engine says")
BADGES = {"agrees": "good", "differs": "bad", "refuses": "bad"}


def verification_section(found: Sequence[Found[VerificationRecord]]) -> Section | None:
    if not found:
        return None
    rows = [row for entry in found for row in verification_rows(entry.record)]
    caption = f"Engines beside transformers on the same folder: {MEASURE}."
    return Section(anchor="serving", title="Serving", body=sortable(caption, COLUMNS, [(row, {}) for row in rows]))


def verification_rows(record: VerificationRecord) -> Iterator[list[Cell]]:
    """A line for the model, and one for the model it stands against."""
    engine = f"{record.engine} {record.engine_version or ''}".strip()
    yield outcome_cells(engine, plots.label_of(record), record.outcome)
    if record.against is not None:
        yield outcome_cells(engine, record.against.model, record.against)


def outcome_cells(engine: str, model: str, outcome: Outcome) -> list[Cell]:
    found = outcome.differences
    same = UNKNOWN if found is None else f"{found.same} of {found.continued}"
    return [
        Cell(shown=engine),
        Cell(shown=model),
        Cell(shown=badge(outcome), value=outcome.verdict),
        difference_cell(None if found is None else found.prefill),
        difference_cell(None if found is None else found.decoding),
        Cell(shown=same, value="" if found is None else found.same, numeric=True),
        Cell(shown=outcome.words or ""),
    ]


def badge(outcome: Outcome) -> Html:
    return element("strong", outcome.verdict, class_=f"badge {BADGES[outcome.verdict]}")


def difference_cell(value: float | None) -> Cell:
    return Cell(shown=UNKNOWN if value is None else f"{value:.1e}", value="" if value is None else value, numeric=True)
