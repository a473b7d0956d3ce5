"""The sections in their order, and the page around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from slimstate.records.folder import Found
from slimstate.report.cuts import cut_section
from slimstate.report.evaluation import evaluation_section
from slimstate.report.page import page
from slimstate.report.pieces import Section
from slimstate.report.recovery import recovery_section
from slimstate.report.reproduce import footer, reproduce_section
from slimstate.report.states import filter_section, state_section
from slimstate.report.summary import head, models
from slimstate.report.tradeoff import tradeoff_section


def render(records: Mapping[str, Sequence[Found]], skipped: Sequence[str], folder: Path) -> str:
    found = (
        cut_section(records.get("plan", ())),
        tradeoff_section(records.get("sweep", ())),
        state_section(records.get("trace", ())),
        filter_section(records.get("filters", ())),
        recovery_section(records.get("recovery", ())),
        evaluation_section(records.get("evaluation", ())),
        reproduce_section(records),
    )
    sections: list[Section] = [section for section in found if section is not None]
    title = f"slimstate report: {', '.join(models(records))}"
    return page(title, head(records, skipped), sections, footer(records, skipped, folder))
