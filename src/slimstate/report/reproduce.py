"""How to do it again, and what exactly it was done with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slimstate.core.stock_class import FLA
from slimstate.records.folder import Found, Records
from slimstate.report.again import AGAIN, distinct, missing
from slimstate.report.markup import Html, element, joined
from slimstate.report.numbers import UNKNOWN
from slimstate.report.pieces import Section, code, command_lines, digest, listing, note
from slimstate.report.provenance import Provenance

if TYPE_CHECKING:
    from slimstate.records.plan import Plan


def reproduce_section(sources: Sequence[Provenance], records: Records, folder: Path) -> Section:
    """Every command that made a record or a cut, once; how to load the cut model; what is not on the page."""
    lines = distinct(line for source in sources for line in source.commands)
    loader = next((source.loader for source in sources if source.loader is not None), FLA)
    cut = cut_folder(records.plan[0]) if records.plan else "SLIM"
    more = dict(missing(records, sources, cut, folder))
    parts = [
        element("h3", "Measure it again") if lines else None,
        note("Each writes to a place of its own under ", code(f"{AGAIN}/"), ", and replaces nothing.")
        if lines
        else None,
        listing("commands", command_lines(lines)) if lines else None,
        element("h3", "Load the result"),
        listing("Python", loader.loading_code(json.dumps(cut, ensure_ascii=False))),
        note(
            "The stock class loads it; no custom code is needed. To run it on a CPU, call ",
            code("slimstate.prepare(model_type)"),
            " before.",
        ),
        element("h3", "Not on this page") if more else None,
        note("; ".join(more), ": there are no records of it here. Then make the page again.") if more else None,
        listing("missing", command_lines(list(more.values()))) if more else None,
    ]
    return Section(anchor="reproduce", title="Reproduce", body=joined(parts))


def cut_folder(plan: Found[Plan]) -> str:
    """Where the model of a plan lies: beside it, or where the plan was copied from."""
    beside = (plan.path.parent / "config.json").exists()
    return str(plan.path.parent) if beside else plan.record.folder or "SLIM"


def footer(sources: Sequence[Provenance], skipped: Sequence[str], folder: Path) -> Html:
    return element(
        "footer",
        element("h2", "Records"),
        record_table(sources, folder),
        kernel_words([source.kernels for source in sources]),
        version_words([source.versions for source in sources]),
        skipped_list(skipped),
        id="records",
    )


def record_table(sources: Sequence[Provenance], folder: Path) -> Html:
    """A line for each file: what it is of, and what tells whether two of them are of the same thing."""
    columns = ("file", "kind", "model", "fingerprint", "text", "seed")
    body = (
        element(
            "tr",
            element("td", code(source.path.relative_to(folder))),
            element("td", source.kind),
            element("td", source.model),
            element("td", digest(source.fingerprint)),
            element("td", digest(source.digest)),
            element("td", UNKNOWN if source.seed is None else source.seed),
        )
        for source in sources
    )
    whole = element(
        "table",
        element("caption", element("span", "The records this page was made from, under ", code(folder), ".")),
        element("thead", element("tr", *(element("th", column, scope="col") for column in columns))),
        element("tbody", *body),
        class_="records",
    )
    return element("div", whole, class_="scroll")


def kernel_words(kernels: Sequence[str | None]) -> Html | None:
    distinct = list(dict.fromkeys(name for name in kernels if name))
    return element("p", f"Kernels: {'; '.join(distinct)}.") if distinct else None


def version_words(versions: Sequence[Mapping[str, str]]) -> Html | None:
    """Each package with every version that a record names."""
    merged: dict[str, list[str]] = {}
    for found in versions:
        for package, version in found.items():
            if version not in merged.setdefault(package, []):
                merged[package].append(version)
    if not merged:
        return None
    items = (element("li", package, " ", code(" / ".join(numbers))) for package, numbers in merged.items())
    return element("ul", *items, class_="versions", aria_label="Versions")


def skipped_list(skipped: Sequence[str]) -> Html | None:
    if not skipped:
        return None
    items = (element("li", line) for line in skipped)
    return joined([element("h3", "Not used"), element("ul", *items, class_="skipped")])
