"""The section on evaluations: every measure of a model, beside its baseline where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slimstate.records.evaluation import EvaluationRecord, Measure, Result
from slimstate.records.folder import RecordFile
from slimstate.records.numbers import fixed, percent, perplexity, plural
from slimstate.report.drawing import drawing, figure_id
from slimstate.report.plots.results import recall_curves
from slimstate.report.plots.style import label_of


def evaluation_section(evaluations: Sequence[RecordFile[EvaluationRecord]]) -> dict[str, Any]:
    """Return what the template shows of every evaluation."""
    return {"evaluations": [_values(file.record, number) for number, file in enumerate(evaluations)]}


def _values(record: EvaluationRecord, number: int) -> dict[str, Any]:
    with_recall = [result for result in (record, record.baseline) if result is not None and result.recall_points]
    recall = None
    if with_recall:
        label = "Recall against the number of pairs"
        recall = drawing(recall_curves(with_recall), figure_id("recall", number), label, recall_tips(with_recall))
    return {"record": record, "rows": list(_rows(record)), "recall": recall}


def _rows(record: EvaluationRecord) -> Iterator[dict[str, Any]]:
    """Yield a row for each measure: its numbers in the record and the baseline, and the share that is left."""
    baseline = {} if record.baseline is None else {measure.name: measure for measure in ordered(record.baseline)}
    shares = {row.measure: row.share for row in record.compared}
    for measure in ordered(record):
        label = "perplexity per token" if measure.name == "perplexity" else measure.label
        arrow = {True: " ↑", False: " ↓", None: ""}[measure.more_is_better]
        measures = (measure, *([] if record.baseline is None else [baseline.get(measure.name)]))
        yield {
            "task": measure.group,
            "label": label + arrow,
            "numbers": [_number(each) for each in measures],
            "share": shares.get(measure.name),
        }


def _number(measure: Measure | None) -> tuple[float | None, str, str]:
    """Return the value of a measure, its text and the text of its standard error."""
    if measure is None or measure.value is None:
        return None, "", ""
    digits = 3
    if measure.group == "text":
        digits = 2 if measure.name.endswith("perplexity") else 4
    error = "" if measure.error is None else f" ± {fixed(measure.error, digits)}"
    return measure.value, perplexity(measure.value, digits), error


def ordered(result: Result) -> list[Measure]:
    """Return the measures of the text, then the tasks with their averages, then recall."""
    measures, nats = list(result.measures()), result.nats_per_token
    if nats is not None:
        name = "nats per token"
        measures.append(Measure(group="text", name=name, label=name, value=nats, more_is_better=False))
    return sorted(measures, key=lambda measure: {"text": 0, "recall": 2}.get(measure.group, 1))


def recall_tips(results: Sequence[Result]) -> dict[str, str]:
    """Return what to show at each point of the recall figure, by the id of the point."""
    tips = {}
    for number, result in enumerate(results):
        for place, point in enumerate(result.recall_points):
            error = f" ± {percent(point.stderr)}" if point.stderr is not None else ""
            questions = f" of {plural(point.questions, 'question')}" if point.questions else ""
            accuracy = f"{point.pairs} pairs: {percent(point.accuracy)}{error}{questions}"
            tips[f"recall-{number}-{place}"] = f"{label_of(result)}\n{accuracy}"
    return tips
