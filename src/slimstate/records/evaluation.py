"""Evaluations: perplexity, tasks and recall of a model, alone, beside a baseline, or at every cut of a sweep."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Annotated

from slimstate.core.standard_errors import ratio_residuals, residual_error
from slimstate.core.stock_class import StockClass
from slimstate.records.base import Record
from slimstate.records.numbers import HUGE, NO_DIFFERENCE, dims_text, is_none, percent, plural, with_error
from slimstate.records.parts import Model, Origin, ReconstructionSettings, Text, TextScores
from slimstate.records.schema import IN_MEMORY, NON_EMPTY, Count, Positive, Value, Whole

ROUNDING = 1e-12  # of standard errors
MAIN_METRICS = ("word_perplexity", "acc_norm", "acc", "contains")  # by preference, where a task shows only one
PER_WORD = "word perplexity"
UNCUT = "uncut"  # the method of rows that keep all channels and store the state in another dtype
UNINFORMED = ("random", "random-rotation")  # methods that use no score
CONTROLS = (*UNINFORMED, "pca-adversarial", "pca-released-adversarial")


class RecallPoint(Value):
    """The accuracy of recall with a number of pairs hidden in the text."""

    pairs: Whole
    accuracy: float
    stderr: float | None = None
    exact: float | None = None
    questions: Count | None = None
    shares: tuple[float, ...] = ()  # of right answers, in each sequence

    @property
    def residuals(self) -> tuple[float, ...]:
        return ratio_residuals(self.shares, [1] * len(self.shares))


class AssociativeRecall(Value):
    points: Annotated[tuple[RecallPoint, ...], NON_EMPTY]
    mean: float | None = None
    stderr: float | None = None  # of the mean
    candidates: Whole
    sequences: Count | None = None
    length: Count | None = None
    seed: int | None = None
    digest: str | None = None

    def measures(self) -> "Iterator[Measure]":
        """Yield the mean, and the accuracy with each number of pairs."""
        residuals = [point.residuals for point in self.points]
        of_mean = [each / len(residuals) for point in residuals for each in point] if all(residuals) else []
        points = [(f"{point.pairs} pairs", point.accuracy, point.stderr, point.residuals) for point in self.points]
        for label, value, error, parts in (("recall", self.mean, self.stderr, tuple(of_mean)), *points):
            name = "associative recall" if label == "recall" else f"associative recall, {label}"
            yield Measure(
                group="recall", name=name, label=label, value=value, more_is_better=True, error=error, residuals=parts,
                digest=self.digest,
            )  # fmt: skip


class TaskData(Value):
    """The source of a task's documents: files with a digest, or a dataset of the hub."""

    path: str | None = None
    digest: str | None = None


class TaskScores(Value):
    """The scores of one task in lm-eval."""

    metrics: Annotated[Mapping[str, float | None], NON_EMPTY]
    stderr: Mapping[str, float | None] = field(default_factory=dict)
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    samples: Count | None = None
    version: int | float | str | None = None
    data: TaskData | None = None


class Measure(Value):
    """A number of an evaluation, with its group and its names."""

    group: str
    name: str
    label: str
    value: float | None
    more_is_better: bool | None
    error: float | None = None
    residuals: tuple[float, ...] = ()  # by how much each window, page or sequence moves the value
    digest: str | None = None  # of what the model read

    @property
    def text(self) -> str:
        """The number with its standard error."""
        if self.value is None:
            return ""
        return with_error(f"{self.value:.4g}" if not 1e4 <= self.value < HUGE else f"{self.value:,.0f}", self.error)

    def difference_error(self, other: "Measure", factor: float = 1.0) -> float | None:
        """Return the standard error of this number less `factor` times another one.

        It is of the pairs of windows, pages or sequences where both models read the same; otherwise, except of a text,
        it is that of two independent numbers. Shares that all change alike do not make a change certain.
        """
        is_same = self.digest == other.digest
        paired = residual_error(self.residuals, other.residuals, factor) if is_same else None
        if self.group == "text" or (paired is not None and (paired > ROUNDING or self.value == other.value)):
            return paired
        return None if self.error is None or other.error is None else math.hypot(self.error, factor * other.error)


class LmEval(Value):
    averages: Mapping[str, float] = field(default_factory=dict)
    stderr: Mapping[str, float] = field(default_factory=dict)  # of the averages
    tasks: Annotated[Mapping[str, TaskScores], NON_EMPTY]
    seed: int | None = None
    limit: Count | None = None
    max_length: Count | None = None  # of the context in tokens; None: the model's own
    lm_eval: str | None = None  # version

    def measures(self) -> Iterator[Measure]:
        """Yield every metric of every task, and the averages."""
        for task, entry in self.tasks.items():
            for metric in entry.metrics:
                yield self._measure(task, metric)
        for average, value in self.averages.items():
            name = f"{average.replace('_', '-')} average"
            error = self.stderr.get(average)
            yield Measure(group="average", name=name, label=name, value=value, more_is_better=True, error=error)

    def main_measures(self) -> Iterator[Measure]:
        """Yield one metric of each task."""
        for task, entry in self.tasks.items():
            yield self._measure(task, next(name for name in (*MAIN_METRICS, *entry.metrics) if name in entry.metrics))

    def _measure(self, task: str, metric: str) -> Measure:
        entry = self.tasks[task]
        return Measure(
            group=task, name=f"{task} {metric}", label=metric, value=entry.metrics[metric],
            more_is_better=entry.higher_is_better.get(metric), error=entry.stderr.get(metric),
        )  # fmt: skip


class Result(Model, TextScores):
    """The measurements of one model."""

    kernels: str | None = None
    text: str | None = None
    digest: str | None = None
    length: Count | None = None
    windows: Count | None = None
    documents: str | None = None  # how the text was split into documents
    perplexity: Positive | None = None  # per token
    nats_per_token: float | None = None
    nats_per_byte: float | None = None
    nats_error: float | None = None  # standard error of `nats_per_token` over windows
    window_nats: tuple[float, ...] = ()  # per token, in each window of the text
    state_dtype: str | None = None  # of states between steps
    state_every: Count | None = None  # tokens between two roundings of the state
    state_bytes: Count | None = None  # per sequence
    associative_recall: AssociativeRecall | None = None
    lm_eval: LmEval | None = None

    @property
    def recall_points(self) -> tuple[RecallPoint, ...]:
        return () if self.associative_recall is None else self.associative_recall.points

    @property
    def averages(self) -> Mapping[str, float]:
        return {} if self.lm_eval is None else self.lm_eval.averages

    def measures(self) -> Iterator[Measure]:
        """Yield every number that can be compared with that of another model."""
        windows = ratio_residuals(self.window_nats, [1] * len(self.window_nats)), self.nats_error
        pages = self.page_residuals, residual_error(self.page_residuals)
        bits, nats = self.bits_per_byte, max(self.nats_per_token or 0.0, 1e-9)
        for name, value, slope, (residuals, error) in (
            ("perplexity", self.perplexity, self.perplexity, windows),
            (PER_WORD, self.word_perplexity, self.word_perplexity, pages),
            ("bits per byte", bits, (bits or 0.0) / nats, windows),
        ):
            if value is not None and slope is not None:
                yield Measure(
                    group="text", name=name, label=name, value=value, more_is_better=False,
                    error=None if error is None else abs(slope) * error,
                    residuals=tuple(slope * residual for residual in residuals),
                )  # fmt: skip
        for scores in (self.associative_recall, self.lm_eval):
            yield from () if scores is None else scores.measures()


class MeasurePair(Value):
    """A number of both models, the share of the baseline's score that the model reaches, and whether they differ."""

    measure: str
    model: float | None = None
    baseline: float | None = None
    share: float | None = None
    error: float | None = None  # standard error of the difference
    share_error: float | None = None

    @property
    def share_text(self) -> str:
        """The share with its standard error, and that there is no difference where it is within two of 100%."""
        if (error := self.share_error) is None:  # of no share, or of an old record
            same = is_none((self.model or 0.0) - (self.baseline or 0.0), self.error)
            return f"{percent(self.share, 1)}{NO_DIFFERENCE if same else ''}"
        return with_error(percent(self.share, 1), 100 * error) + NO_DIFFERENCE * is_none(1 - (self.share or 0.0), error)


class EvaluationRecord(Record, Result, Origin):
    KIND = "evaluation"
    FILE = "slimstate_evaluation.json"  # beside the weights of a model that was cut or reconstructed, and measured

    baseline: Result | None = None
    compared: tuple[MeasurePair, ...] = ()
    out: str | None = field(default=None, metadata=IN_MEMORY, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.page_nats:  # errors that old records have are of windows, which are other text than pages
            pairs = (replace(pair, error=None) if pair.measure == PER_WORD else pair for pair in self.compared)
            object.__setattr__(self, "compared", tuple(pairs))

    def headline(self) -> str:
        beside = "" if self.baseline is None else f", beside {self.baseline.name}"
        return f"{self.name}{beside}" + ("" if self.text is None else f" on {self.text}: {self.counts}")

    def table(self) -> list[dict[str, object]]:
        """Return a row for every number, with that of the baseline if there is one."""
        pairs = {
            row.measure: {"baseline": row.baseline, "share": row.share, "difference_error": row.error}
            for row in self.compared
        }
        return [
            {"measure": item.name, "value": item.value, "error": item.error, **pairs.get(item.name, {})}
            for item in self.measures()
        ]

    def comparison(self, *, main: bool = False) -> Iterator[tuple[str, str, str, str]]:
        """Yield each number of both models as text, with the share kept; `main`: perplexity and mean recall alone.

        Word perplexity stands alone only where it has a standard error, which one page has not.
        """
        has_error = any(pair.measure == PER_WORD and pair.error is not None for pair in self.compared)
        units = [PER_WORD] if has_error else [PER_WORD, "perplexity", "bits per byte"]
        texts = [{item.name: item.text for item in each.measures()} for each in (self, self.baseline) if each]
        for pair in self.compared:
            if not main or pair.measure in (*units, "associative recall"):
                yield pair.measure, texts[0][pair.measure], texts[1][pair.measure], pair.share_text

    def summary(self) -> Iterator[str]:
        """Yield lines on the perplexity of both models, per word or else per token and byte, and on their recall."""
        for name, model, baseline, share in self.comparison(main=True):
            yield f"{name} {baseline} before, {model} after; share kept {share}"

    def contradiction(self) -> str | None:
        scores = self.perplexity, self.lm_eval, self.associative_recall
        return None if any(scores) else "it holds neither a perplexity nor a task nor recall"


class SweepSettings(Value):
    """What decides the numbers of a sweep."""

    fingerprint: str | None = None
    calibration: Text | None = None
    text: Text | None = None
    wikitext: str | None = None  # the digest of the pages of its word perplexity
    f: float | None = None
    swaps: Count | None = None
    rows: Count | None = None  # queries and keys that drrqr saw, if not all
    seed: int | None = None
    device: str | None = None
    dtype: str | None = None
    keep_norm_eps: bool = False
    keep_heads: bool = False
    tasks: Mapping[str, TaskData] = field(default_factory=dict)  # by name
    limit: Count | None = None
    max_length: Count | None = None
    recall: Count = 0  # sequences for each number of pairs
    recall_prompts: str | None = None  # how the prompts of recall tasks are truncated, if not in the default way
    value_method: str | None = None  # how value channels are chosen, if named
    function: str | None = None  # of the user, which gives more scores
    reconstruct: ReconstructionSettings | None = None  # if cuts were reconstructed before they were measured
    state_every: Whole = 1  # tokens between two roundings of the state


class ModelScores(TextScores):
    """The scores of a model in a sweep, and the size of its state."""

    key_dim: Count
    state_bytes: Positive
    nats_per_token: float | None = None
    associative_recall: AssociativeRecall | None = None
    user_scores: Mapping[str, float] = field(default_factory=dict)  # by name
    lm_eval: LmEval | None = None

    def measures(self, *, main: bool = False) -> Iterator[Measure]:
        """Yield mean recall, the scores of the user, and every metric of every task, or the main one of each."""
        if self.associative_recall is not None:
            yield next(self.associative_recall.measures())
        for name, value in self.user_scores.items():
            yield Measure(group="user", name=name, label=name, value=value, more_is_better=None)
        if self.lm_eval is not None:
            yield from self.lm_eval.main_measures() if main else self.lm_eval.measures()


class Uncut(ModelScores):
    """The uncut model; its perplexity is per token."""

    perplexity: Positive
    rank_utilisation: float
    window_nats: tuple[float, ...] = ()  # per token, in each window of the text


class Row(ModelScores):
    """A cut by a method, with a score, to a key dim and maybe a value dim; its perplexity is per token."""

    method: str
    score: str
    compression: float
    state_dtype: str = "float32"  # in which `state_bytes` are counted
    perplexity: Positive | None = None
    rank_utilisation: float | None = None
    nats_over_uncut: float | None = None
    nats_error: float | None = None  # standard error of `nats_over_uncut` over windows
    recall_over_uncut: float | None = None
    recall_error: float | None = None  # standard error of `recall_over_uncut` over sequences
    kappa: float | None = None
    kappa_worst: float | None = None
    value_dim: Whole | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.method, self.score, self.dims, self.state_dtype

    @property
    def is_control(self) -> bool:
        return self.method in CONTROLS

    @property
    def dims(self) -> str:
        """The key dim, and where values are cut the value dim: 64 x 32."""
        return dims_text(self.key_dim, self.value_dim)


class Recommendation(Value):
    """The cut with the smallest state within the maximum loss, or with the smallest loss; `row` is its index."""

    row: Count | None = None
    within: bool | None = None
    max_loss: float | None = None
    reason: str | None = None
    command: str | None = None

    def line(self) -> str:
        return f"{'recommended: ' if self.within else ''}{self.reason}"


class SweepRecord(Record, Origin):
    KIND = "sweep"

    model: str
    model_type: str | None = None
    loader: StockClass | None = None
    width: Whole
    value_dim: Count | None = None
    settings: SweepSettings = field(default_factory=SweepSettings)
    uncut: Uncut
    rows: Annotated[tuple[Row, ...], NON_EMPTY]
    recommended: Recommendation | None = None
    out: str | None = field(default=None, metadata=IN_MEMORY, compare=False)

    def headline(self) -> str:
        uncut = self.uncut.perplexity
        advice = "" if self.recommended is None else f"\n{self.recommended.line()}"
        return f"{plural(len(self.rows), 'cut')} of {self.model}; perplexity per token, {uncut:.4g} uncut{advice}"

    def table(self) -> list[dict[str, object]]:
        """Return a row for the uncut model and for every cut."""
        columns = ["state_dtype"] * (len(self.state_dtypes) > 1)
        columns += ["key_dim", "value_dim", "perplexity", "word_perplexity", "bits_per_byte", "rank_utilisation"]
        uncut = {"method": UNCUT, "score": None, **{name: getattr(self.uncut, name, None) for name in columns}}
        names = ("method", "score", *columns, "nats_over_uncut", "nats_error", "recall_over_uncut", "recall_error")
        rows = [uncut, *({name: getattr(row, name) for name in names} for row in self.rows)]
        for line, result in zip(rows, (self.uncut, *self.rows), strict=True):
            line |= {measure.name: measure.value for measure in result.measures()}
        return rows

    @property
    def state_dtypes(self) -> tuple[str, ...]:
        """The dtypes of states; float32 unless others were measured."""
        return tuple(dict.fromkeys(row.state_dtype for row in self.rows))

    @property
    def front(self) -> tuple[int, ...]:
        """The indices of rows that no other row, nor the uncut model, beats in both bytes and nats per token."""
        scores = {place: (row.state_bytes, row.nats_per_token) for place, row in enumerate((*self.rows, self.uncut))}
        points = {place: (size, nats) for place, (size, nats) in scores.items() if nats is not None}

        def is_beaten(point: tuple[float, float]) -> bool:
            return any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points.values())

        return tuple(place for place, point in points.items() if place < len(self.rows) and not is_beaten(point))

    def contradiction(self) -> str | None:
        row = None if self.recommended is None else self.recommended.row
        return f"recommended.row {row} is none of the rows" if row is not None and row >= len(self.rows) else None
