"""Evaluation: every measure of a model, beside its baseline where there is one."""

from __future__ import annotations

from collections.abc import Sequence

from slimstate.records.evaluation import EvaluationRecord, Measure, Result
from slimstate.records.folder import Found
from slimstate.report import plots
from slimstate.report.markup import Html, element, joined, variable
from slimstate.report.numbers import UNKNOWN, fixed, percent, perplexity, plural
from slimstate.report.pieces import Cell, Section, code, drawing, figure, note, prefix, sortable

FEW_TOKENS = 50_000  # below which a share says little


def evaluation_section(evaluations: Sequence[Found[EvaluationRecord]]) -> Section | None:
    if not evaluations:
        return None
    bodies = [evaluation_body(found.record, number) for number, found in enumerate(evaluations)]
    return Section(anchor="evaluation", title="Evaluation", body=joined(bodies))


def evaluation_body(record: EvaluationRecord, number: int) -> Html:
    baseline = record.baseline
    title = plots.label_of(record) + (f" beside {plots.label_of(baseline)}" if baseline else "")
    return joined(
        [
            element("h3", title),
            measured_on(record),
            measure_table(record, baseline),
            few_tokens(record.tokens, "kept") if baseline else None,
            recall_figure([record, baseline] if baseline else [record], prefix("recall", number)),
        ]
    )


def measured_on(record: EvaluationRecord) -> Html | None:
    if not record.text:
        return None
    known = record.windows and record.length
    size = f", {plural(record.windows or 0, 'window')} of {record.length} tokens" if known else ""
    counts = f": {record.counts}" if record.counts else ""
    return note("Perplexity on ", code(record.text), f"{size}{counts}.")


def few_tokens(count: int | None, share: str) -> Html | None:
    """A warning where a share, by the name of its column, rests on little text."""
    if count is None or count >= FEW_TOKENS:
        return None
    badge = element("strong", "Few tokens", class_="badge bad")
    words = f" Measured on {count:,} tokens: “{share}” may be off by several percent. Shares to rely on need"
    return element("p", badge, f"{words} {FEW_TOKENS:,} or more.", class_="note")


def ordered_measures(result: Result) -> list[Measure]:
    """The text, then the tasks and their averages, then recall."""
    beside = [
        Measure(group="text", name=label, label=label, value=value, more_is_better=False)
        for label, value in (("nats per token", result.nats_per_token),)
        if value is not None
    ]
    groups = {"text": 0, "recall": 2}
    return sorted([*result.measures(), *beside], key=lambda measure: groups.get(measure.group, 1))


def shown(measure: Measure) -> str:
    """With an arrow towards the better."""
    label = "perplexity per token" if measure.name == "perplexity" else measure.label
    return label + {True: " ↑", False: " ↓", None: ""}[measure.more_is_better]


def digits(measure: Measure) -> int:
    return (2 if measure.name.endswith("perplexity") else 4) if measure.group == "text" else 3


def measure_table(record: EvaluationRecord, baseline: Result | None) -> Html:
    theirs = {measure.name: measure for measure in ordered_measures(baseline)} if baseline else {}
    shares = {row.measure: row.share for row in record.compared}
    beside = [f"{baseline.name} (baseline)", "kept"] if baseline else []
    columns = ["task", "measure", record.name, *beside]
    rows: list[tuple[list[Cell], dict[str, object]]] = [
        (
            [
                Cell(shown=measure.group),
                Cell(shown=shown(measure)),
                number_cell(measure),
                *([number_cell(theirs.get(measure.name)), share_cell(shares.get(measure.name))] if baseline else []),
            ],
            {},
        )
        for measure in ordered_measures(record)
    ]
    kept = " “Kept” is the share of the baseline's score that is left, 100% being all of it." if baseline else ""
    return sortable(f"↑ more is better, ↓ less is better; ± is a standard error.{kept}", columns, rows)


def number_cell(measure: Measure | None) -> Cell:
    if measure is None or measure.value is None:
        return Cell(shown=UNKNOWN, value="", numeric=True)
    error = element("small", f" ± {fixed(measure.error, digits(measure))}") if measure.error is not None else None
    told = perplexity(measure.value, digits(measure))
    return Cell(shown=joined([told, error]), value=measure.value, numeric=True)


def share_cell(share: float | None) -> Cell:
    if share is None:
        return Cell(shown=UNKNOWN, value="", numeric=True)
    bar = element("span", class_="bar", style=variable("share", f"{min(max(share, 0), 1):.3f}"))
    return Cell(shown=joined([percent(share, 1), bar]), value=share, numeric=True)


def recall_figure(results: Sequence[Result], name: str) -> Html | None:
    """How recall falls with the number of pairs."""
    able = [result for result in results if result.recall_points]
    if not able:
        return None
    picture = drawing(plots.recall_curves(able), name, "Recall against the number of pairs", recall_tips(able))
    return figure(
        picture,
        "How often the model recalls which value went with a key, the more pairs stand in the text: higher is better, "
        "and the dashed line is what guessing gives.",
    )


def recall_tips(results: Sequence[Result]) -> dict[str, str]:
    tips = {}
    for number, result in enumerate(results):
        for i, point in enumerate(result.recall_points):
            error = f" ± {percent(point.stderr)}" if point.stderr is not None else ""
            asked = f" of {plural(point.questions, 'question')}" if point.questions else ""
            tips[f"recall-{number}-{i}"] = (
                f"{plots.label_of(result)}\n{point.pairs} pairs: {percent(point.accuracy)}{error}{asked}"
            )
    return tips
