"""Render the page: one HTML file with nothing to fetch. The templates escape every value from a record."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from slimstate.records import numbers
from slimstate.records.folder import Records
from slimstate.records.serving import MEASURE
from slimstate.report import plots
from slimstate.report.cuts import cut_section
from slimstate.report.evaluation import evaluation_section
from slimstate.report.provenance import merged_versions, provenances, reproduce_section
from slimstate.report.states import filter_section, state_section
from slimstate.report.summary import base_models, summary_cards
from slimstate.report.sweeps import sweep_section
from slimstate.report.training import reconstruction_section, recovery_section

TEMPLATES = Path(__file__).parent / "templates"
FILTERS = ("fixed", "perplexity", "signed", "percent", "mebibytes", "magnitude", "plural")


def render(records: Records, folder: Path) -> str:
    """Return the page of records that lie in a folder."""
    sources = provenances(records)
    candidates: tuple[tuple[str, str, Callable[..., dict[str, Any]], Sequence[object]], ...] = (
        ("cut", "What was cut", cut_section, records.plan),
        ("trade-off", "Trade-off", sweep_section, records.sweep),
        ("states", "State utilisation", partial(state_section, sweeps=records.sweep), records.trace),
        ("filters", "Convolution filters", filter_section, records.filters),
        ("reconstruction", "Reconstruction", reconstruction_section, records.reconstruction),
        ("recovery", "Recovery", recovery_section, records.recovery),
        ("evaluation", "Evaluation", evaluation_section, records.evaluation),
        ("serving", "Serving", lambda files: {"files": files, "measure": MEASURE}, records.verification),
    )
    sections = [(name, title, _body(name, values(files))) for name, title, values, files in candidates if files]
    reproduce = _body("reproduce", reproduce_section(sources, records, folder))
    text = _template("page").render(
        models=base_models(sources),
        cards=list(summary_cards(records)),
        sections=[*sections, ("reproduce", "Reproduce", reproduce)],
        sources=sources,
        folder=folder,
        kernels=list(dict.fromkeys(source.kernels for source in sources if source.kernels)),
        versions=merged_versions(sources),
        skipped=records.skipped,
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # a file name may hold what no encoding has


def _body(name: str, values: dict[str, Any]) -> Markup:
    return Markup(_template(name).render(values))


def _template(name: str) -> Template:
    return _environment().get_template(f"{name}.html")


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {name: getattr(numbers, name) for name in FILTERS}
    environment.filters["model_label"] = plots.label_of
    environment.filters["options"] = lambda command: re.split(r" (?=--)", command)
    environment.globals["verbatim"] = lambda name: Markup((TEMPLATES / name).read_text(encoding="utf-8"))
    return environment
