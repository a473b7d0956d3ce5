"""Render the page: one HTML file with nothing to fetch. The templates escape every value from a record."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from slimstate.records import numbers
from slimstate.records.folder import RecordFile, Records, read_records
from slimstate.records.training import ReconstructionRecord, RecoveryRecord
from slimstate.reports import sections, tables
from slimstate.reports.plots import results, states, style
from slimstate.reports.provenance import merged_versions, provenances, reproduce_section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from slimstate.records.plan import Plan

TEMPLATES = Path(__file__).parent / "templates"
SECTIONS = (  # template, title, kind of records
    ("cut", "What was cut", "plan"),
    ("trade-off", "Trade-off", "sweep"),
    ("states", "State utilisation", "trace"),
    ("filters", "Convolution filters", "filters"),
    ("reconstruction", "Reconstruction", "reconstruction"),
    ("recovery", "Recovery", "recovery"),
    ("training", "Training", "training"),
    ("evaluation", "Evaluation", "evaluation"),
    ("serving", "Serving", "verification"),
    ("bench", "Speed", "bench"),
)
FILTERS = ("fixed", "perplexity", "signed", "with_error", "percent", "mebibytes", "magnitude", "brief", "plural")
PAGE_WIDTH = 0.78  # of the width in print: on a phone a drawing is as wide as the screen, and its text stays readable
OPENING = Markup('<svg role="{}" aria-label="{}" class="drawing"')
MARK = Markup('id="{}" class="dot" tabindex="0" role="img" aria-label="{}" data-tip="{}"')


def unique_records(folder: Path) -> Records:
    """Return the records under a folder, without the copies of plans that `analyze` and trainings make."""
    records = read_records(folder)

    def is_copy(plan: "RecordFile[Plan]") -> bool:
        trainings = (ReconstructionRecord.FILE, RecoveryRecord.FILE)
        return plan.record.folder is not None or any((plan.path.parent / name).exists() for name in trainings)

    originals = [plan.record for plan in records.plan if not is_copy(plan)]
    unique = [plan for plan in records.plan if not is_copy(plan) or not any(map(plan.record.same_cut, originals))]
    return replace(records, plan=tuple(unique))


def render(records: Records, folder: Path) -> str:
    """Return the page of records that lie in a folder."""
    sources = provenances(records)
    ordered = sorted(sources, key=lambda source: source.file.record.KIND == "filters")  # whose models come last
    bodies = [
        (name, title, _fill(name, page=records, files=files, records=[file.record for file in files]))
        for name, title, kind in SECTIONS
        if (files := getattr(records, kind))
    ]
    text = _fill(
        "page",
        models=list(dict.fromkeys(source.base for source in ordered if source.base)),
        cards=list(sections.summary_cards(records)),
        bodies=[*bodies, ("reproduce", "Reproduce", _fill("reproduce", **reproduce_section(sources, records, folder)))],
        sources=sources,
        folder=folder,
        kernels=list(dict.fromkeys(source.kernels for source in sources if source.kernels)),
        versions=merged_versions(sources),
        skipped=records.skipped,
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # a file name may hold what no encoding has


def _fill(name: str, **values: object) -> Markup:
    return Markup(_environment().get_template(f"{name}.html").render(values))


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {name: getattr(numbers, name) for name in FILTERS}
    environment.filters |= {"model_label": style.label_of, "mean": fmean, "strip_path": sections.strip_path}
    environment.filters["options"] = lambda command: re.split(r" (?=--)", command)
    environment.globals |= {"results": results, "states": states, "sections": sections, "tables": tables}
    environment.globals["drawing"] = drawing
    environment.globals["verbatim"] = lambda name: Markup((TEMPLATES / name).read_text(encoding="utf-8"))
    return environment


def drawing(figure: "Figure", name: str, label: str, tips: Mapping[str, str]) -> Markup:
    """Return a figure as SVG whose ids begin with `name`; `tips` are texts for elements, by id without that prefix."""
    figure.set_figwidth(figure.get_figwidth() * PAGE_WIDTH)
    text = style.svg(figure, name).replace("<svg", OPENING.format("group" if tips else "img", label), 1)
    for identifier, tip in tips.items():
        text = text.replace(f'id="{name}-{identifier}"', MARK.format(f"{name}-{identifier}", tip, tip), 1)
    return Markup(text)
