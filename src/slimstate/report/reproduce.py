"""How to do it again, and what exactly it was done with."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimstate.core.stock_class import FLA, StockClass
from slimstate.records.folder import Found
from slimstate.report.markup import Html, element, joined
from slimstate.report.pieces import Section, code, command_lines, digest, listing, note

Records = Mapping[str, Sequence[Found]]
ORDER = ("sweep", "plan", "recovery", "trace", "filters", "evaluation")


def commands(records: Records) -> list[str]:
    """Every command that made a record, once, and those that make the cuts."""
    return list(dict.fromkeys(line for kind in ORDER for found in records.get(kind, ()) for line in _of(found)))


def _of(found: Found) -> Iterator[str]:
    if found.kind == "plan":
        yield shlex.join(
            ["slimstate", "prune", found.data["model"]["source"], "--apply", str(found.path), "--out", "SLIM"]
        )
    if found.data.get("command"):
        yield found.data["command"]
    recommended = (found.data.get("recommended") or {}).get("command")
    if recommended:
        yield recommended


def reproduce_section(records: Records) -> Section | None:
    lines = commands(records)
    cut = next(iter(records.get("plan", ())), None)
    folder = cut_folder(cut) if cut else "SLIM"
    parts = [
        element("h3", "Measure it again") if lines else None,
        listing("commands", command_lines(lines)) if lines else None,
        element("h3", "Load the result"),
        listing("Python", _loader(records).loading_code(json.dumps(folder, ensure_ascii=False))),
        note(
            "The stock class loads it; no custom code is needed. To run it on a CPU, call ",
            code("slimstate.prepare(model_type)"),
            " before.",
        ),
    ]
    return Section(anchor="reproduce", title="Reproduce", body=joined(parts))


def _loader(records: Records) -> StockClass:
    """What loads the model, by the first record that says it."""
    abouts = (
        found.data["model"] if found.kind == "plan" else found.data for kind in ORDER for found in records.get(kind, ())
    )
    found = next((about["loader"] for about in abouts if about.get("loader")), None)
    return FLA if found is None else StockClass(library=found["library"], name=found["class"])


def cut_folder(plan: Found) -> str:
    """Where the model of a plan lies: beside it, or where the plan was copied from."""
    beside = (plan.path.parent / "config.json").exists()
    return str(plan.path.parent) if beside else str(plan.data.get("folder") or "SLIM")


def footer(records: Records, skipped: Sequence[str], folder: Path) -> Html:
    found = [record for kind in ORDER for record in records.get(kind, ())]
    return element(
        "footer",
        element("h2", "Records"),
        record_table(found, folder),
        kernel_words([record.data.get("kernels") for record in found]),
        version_words([record.data.get("versions") or {} for record in found]),
        skipped_list(skipped),
        id="records",
    )


def record_table(found: Sequence[Found], folder: Path) -> Html:
    """A line for each file: what it is of, and what tells whether two of them are of the same thing."""
    columns = ("file", "kind", "model", "fingerprint", "text", "seed")
    body = (
        element(
            "tr",
            element("td", code(record.path.relative_to(folder))),
            element("td", record.kind),
            *(element("td", value) for value in origin(record.kind, record.data)),
        )
        for record in found
    )
    whole = element(
        "table",
        element("caption", element("span", "The records this page was made from, under ", code(folder), ".")),
        element("thead", element("tr", *(element("th", column, scope="col") for column in columns))),
        element("tbody", *body),
        class_="records",
    )
    return element("div", whole, class_="scroll")


def origin(kind: str, data: Mapping[str, Any]) -> tuple[object, ...]:
    """Model, its fingerprint, the digest of the text, the seed."""
    settings = data.get("settings") or {}
    text: Mapping[str, Any]
    if kind == "plan":
        model, fingerprint = data["model"]["source"], data["model"].get("fingerprint")
        text = data.get("calibration") or {}
    else:
        model, fingerprint = data["model"], data.get("fingerprint") or settings.get("fingerprint")
        texts = {"evaluation": data, "recovery": data.get("corpus")}
        text = texts.get(kind) or data.get("text") or settings.get("text") or {}
    seed = data.get("seed", settings.get("seed"))
    return model, digest(fingerprint), digest(text.get("digest")), "–" if seed is None else seed


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
