"""Evaluation: every measure of a model, beside its baseline where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimstate import plots
from slimstate.record import Found
from slimstate.report.markup import Html, element, joined
from slimstate.report.numbers import UNKNOWN, fixed, percent, plural
from slimstate.report.pieces import Cell, Section, code, drawing, figure, note, prefix, sortable

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of a model. `name` is what `compared` calls it; `error` is its standard error."""

    group: str
    name: str
    shown: str
    value: float | None
    error: float | None = None
    digits: int = 2


def evaluation_section(evaluations: Sequence[Found]) -> Section | None:
    if not evaluations:
        return None
    bodies = [evaluation_body(found.data, number) for number, found in enumerate(evaluations)]
    return Section(anchor="evaluation", title="Evaluation", body=joined(bodies))


def evaluation_body(record: Record, number: int) -> Html:
    baseline = record.get("baseline") or None
    title = plots.label_of(record) + (f" beside {plots.label_of(baseline)}" if baseline else "")
    return joined(
        [
            element("h3", title),
            measured_on(record),
            measure_table(record, baseline),
            recall_figure([record, baseline] if baseline else [record], prefix("recall", number)),
        ]
    )


def measured_on(record: Record) -> Html | None:
    if not record.get("text"):
        return None
    known = record.get("windows") and record.get("length")
    size = f", {plural(record['windows'], 'window')} of {record['length']} tokens" if known else ""
    return note("Perplexity on ", code(record["text"]), f"{size}.")


def measures(result: Record) -> Iterator[Measure]:
    """Perplexity, then the tasks and their averages, then recall."""
    for field, shown, digits in (
        ("perplexity", "perplexity ↓", 2),
        ("nats_per_token", "nats per token ↓", 4),
        ("bits_per_byte", "bits per byte ↓", 4),
    ):
        if result.get(field) is not None:
            yield Measure(group="text", name=field, shown=shown, value=result[field], digits=digits)
    yield from task_measures(result.get("lm_eval") or {})
    for point in (result.get("associative_recall") or {}).get("points", ()):
        yield Measure(
            group="recall",
            name=f"associative recall, {point['pairs']} pairs",
            shown=f"{point['pairs']} pairs ↑",
            value=point["accuracy"],
            error=point.get("stderr"),
            digits=3,
        )


def task_measures(lm_eval: Record) -> Iterator[Measure]:
    for task, entry in (lm_eval.get("tasks") or {}).items():
        better = entry.get("higher_is_better") or {}
        for metric, value in entry["metrics"].items():
            arrow = (" ↑" if better[metric] else " ↓") if metric in better else ""
            error = (entry.get("stderr") or {}).get(metric)
            yield Measure(
                group=task, name=f"{task} {metric}", shown=f"{metric}{arrow}", value=value, error=error, digits=3
            )
    for average, value in (lm_eval.get("averages") or {}).items():
        name = f"{average.replace('_', '-')} average"
        yield Measure(group="average", name=name, shown=f"{name} ↑", value=value, digits=3)


def measure_table(record: Record, baseline: Record | None) -> Html:
    theirs = {measure.name: measure for measure in measures(baseline)} if baseline else {}
    shares = {row["measure"]: row.get("share") for row in record.get("compared") or ()}
    beside = [f"{baseline['name']} (baseline)", "kept"] if baseline else []
    columns = ["task", "measure", record["name"], *beside]
    rows: list[tuple[list[Cell], dict[str, object]]] = [
        (
            [
                Cell(shown=measure.group),
                Cell(shown=measure.shown),
                number_cell(measure),
                *([number_cell(theirs.get(measure.name)), share_cell(shares.get(measure.name))] if baseline else []),
            ],
            {},
        )
        for measure in measures(record)
    ]
    kept = " “Kept” is the share of the baseline's score that is left, 100% being all of it." if baseline else ""
    return sortable(f"↑ more is better, ↓ less is better; ± is a standard error.{kept}", columns, rows)


def number_cell(measure: Measure | None) -> Cell:
    if measure is None or measure.value is None:
        return Cell(shown=UNKNOWN, value="", numeric=True)
    error = element("small", f" ± {fixed(measure.error, measure.digits)}") if measure.error is not None else None
    return Cell(shown=joined([fixed(measure.value, measure.digits), error]), value=measure.value, numeric=True)


def share_cell(share: float | None) -> Cell:
    if share is None:
        return Cell(shown=UNKNOWN, value="", numeric=True)
    bar = element("span", class_="bar", style=f"--share:{min(max(share, 0), 1):.3f}")
    return Cell(shown=joined([percent(share, 1), bar]), value=share, numeric=True)


def recall_figure(results: Sequence[Record], name: str) -> Html | None:
    """How recall falls with the number of pairs."""
    able = [result for result in results if result.get("associative_recall")]
    if not able:
        return None
    picture = drawing(plots.recall_curves(able), name, "Recall against the number of pairs", recall_tips(able))
    return figure(
        picture,
        "How often the model recalls which value went with a key, the more pairs stand in the text: higher is better, "
        "and the dashed line is what guessing gives.",
    )


def recall_tips(results: Sequence[Record]) -> dict[str, str]:
    tips = {}
    for number, result in enumerate(results):
        for i, point in enumerate(result["associative_recall"]["points"]):
            error = f" ± {percent(point['stderr'])}" if point.get("stderr") is not None else ""
            asked = f" of {plural(point['questions'], 'question')}" if point.get("questions") else ""
            tips[f"recall-{number}-{i}"] = (
                f"{plots.label_of(result)}\n{point['pairs']} pairs: {percent(point['accuracy'])}{error}{asked}"
            )
    return tips
