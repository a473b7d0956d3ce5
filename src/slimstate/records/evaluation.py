"""What a model scores: perplexity of a text, tasks, recall; alone or beside a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from slimstate.records.base import Record
from slimstate.records.parts import Model, Origin, Predicted
from slimstate.records.schema import IN_MEMORY, NON_EMPTY, Count, Positive, Whole


@dataclass(frozen=True, kw_only=True)
class RecallPoint:
    """How often the right name was given when so many pairs were hidden in the text."""

    pairs: Whole
    accuracy: float
    stderr: float | None = None
    exact: float | None = None
    questions: Count | None = None


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall:
    points: Annotated[tuple[RecallPoint, ...], NON_EMPTY]
    mean: float | None = None
    candidates: Whole
    sequences: Count | None = None
    length: Count | None = None
    seed: int | None = None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """Where the documents of a task came from: files with a digest, or a dataset of the hub."""

    path: str | None = None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """What lm-eval found for one task."""

    metrics: Annotated[Mapping[str, float | None], NON_EMPTY]
    stderr: Mapping[str, float | None] = field(default_factory=dict)
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    samples: Count | None = None
    version: int | float | str | None = None
    data: TaskData | None = None


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of an evaluation: what it is of, its name in a comparison, and whether more of it is better."""

    group: str
    name: str
    label: str
    value: float | None
    more_is_better: bool | None
    error: float | None = None


CHIEF = ("word_perplexity", "acc_norm", "acc", "contains")  # metrics that stand for a task, the first it has


@dataclass(frozen=True, kw_only=True)
class LmEval:
    averages: Mapping[str, float] = field(default_factory=dict)
    tasks: Annotated[Mapping[str, TaskScores], NON_EMPTY]
    seed: int | None = None
    limit: Count | None = None
    max_length: Count | None = None  # tokens at once, where it was not left to the model's config
    lm_eval: str | None = None  # its version

    def measures(self) -> Iterator[Measure]:
        """Every metric of every task, and the averages."""
        for task, entry in self.tasks.items():
            for metric in entry.metrics:
                yield self._measure(task, metric)
        for average, value in self.averages.items():
            name = f"{average.replace('_', '-')} average"
            yield Measure(group="average", name=name, label=name, value=value, more_is_better=True)

    def chief_measures(self) -> Iterator[Measure]:
        """One metric of each task, where there is room for no more."""
        for task, entry in self.tasks.items():
            yield self._measure(task, next(name for name in (*CHIEF, *entry.metrics) if name in entry.metrics))

    def _measure(self, task: str, metric: str) -> Measure:
        entry = self.tasks[task]
        return Measure(
            group=task, name=f"{task} {metric}", label=metric, value=entry.metrics[metric],
            more_is_better=entry.higher_is_better.get(metric), error=entry.stderr.get(metric),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Result(Model, Predicted):
    """All that was measured of one model."""

    kernels: str | None = None
    text: str | None = None
    digest: str | None = None
    length: Count | None = None
    windows: Count | None = None
    documents: str | None = None  # how those of the text were told apart
    perplexity: Positive | None = None  # per token
    nats_per_token: float | None = None
    nats_per_byte: float | None = None
    state_dtype: str | None = None  # in which states were kept between steps
    state_every: Count | None = None  # tokens of a step, where storing a state loses something
    state_bytes: Count | None = None  # per sequence, in that type
    associative_recall: AssociativeRecall | None = None
    lm_eval: LmEval | None = None

    @property
    def recall_points(self) -> tuple[RecallPoint, ...]:
        return () if self.associative_recall is None else self.associative_recall.points

    @property
    def averages(self) -> Mapping[str, float]:
        """Of the tasks, by name."""
        return {} if self.lm_eval is None else self.lm_eval.averages

    def measures(self) -> Iterator[Measure]:
        """Every number that can be compared with that of another model."""
        for name, value in (
            ("perplexity", self.perplexity),
            ("word perplexity", self.word_perplexity),
            ("bits per byte", self.bits_per_byte),
        ):
            if value is not None:
                yield Measure(group="text", name=name, label=name, value=value, more_is_better=False)
        for point in self.recall_points:
            label = f"{point.pairs} pairs"
            yield Measure(
                group="recall", name=f"associative recall, {label}", label=label, value=point.accuracy,
                more_is_better=True, error=point.stderr,
            )  # fmt: skip
        yield from () if self.lm_eval is None else self.lm_eval.measures()


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A number of both models; the share is what the model has of the baseline's score: 1 is all of it."""

    measure: str
    model: float | None = None
    baseline: float | None = None
    share: float | None = None


def _beside(row: Compared | None) -> dict[str, object]:
    return {} if row is None else {"baseline": row.baseline, "share": row.share}


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(Record, Result, Origin):
    KIND: ClassVar[str] = "evaluation"

    baseline: Result | None = None
    compared: tuple[Compared, ...] = ()
    out: str | None = field(default=None, metadata=IN_MEMORY, compare=False)

    def headline(self) -> str:
        beside = "" if self.baseline is None else f", beside {self.baseline.name}"
        return f"{self.name}{beside}" + ("" if self.text is None else f" on {self.text}: {self.counts}")

    def table(self) -> list[dict[str, object]]:
        """One row for every number, beside the baseline's where there is one."""
        theirs = {row.measure: row for row in self.compared}
        return [
            {"measure": found.name, "value": found.value}
            | ({} if self.baseline is None else _beside(theirs.get(found.name)))
            for found in self.measures()
        ]

    def contradiction(self) -> str | None:
        measured = any((self.perplexity, self.lm_eval, self.associative_recall))
        return None if measured else "it holds neither a perplexity nor a task nor recall"
