"""The sections in their order, and the page around them."""

from __future__ import annotations

from pathlib import Path

from slimstate.records.folder import Records
from slimstate.report.cuts import cut_section
from slimstate.report.evaluation import evaluation_section
from slimstate.report.page import page
from slimstate.report.pieces import Section
from slimstate.report.provenance import provenances
from slimstate.report.reconstruction import reconstruction_section
from slimstate.report.recovery import recovery_section
from slimstate.report.reproduce import footer, reproduce_section
from slimstate.report.states import filter_section, state_section
from slimstate.report.summary import head, models
from slimstate.report.tradeoff import tradeoff_section
from slimstate.report.verification import verification_section


def render(records: Records, folder: Path) -> str:
    sources = provenances(records)
    found = (
        cut_section(records.plan),
        tradeoff_section(records.sweep),
        state_section(records.trace, records.sweep),
        filter_section(records.filters),
        reconstruction_section(records.reconstruction),
        recovery_section(records.recovery),
        evaluation_section(records.evaluation),
        verification_section(records.verification),
        reproduce_section(sources, records, folder),
    )
    sections: list[Section] = [section for section in found if section is not None]
    names = models(sources)
    title = f"slimstate report: {', '.join(names)}"
    return page(title, head(records, names), sections, footer(sources, records.skipped, folder))
