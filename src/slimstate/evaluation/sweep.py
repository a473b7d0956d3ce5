"""Measure the candidates of a sweep, always on the same windows, and recommend one of them.

The record is written after every row, so that an interrupted sweep continues where it was.
"""

import inspect
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.layout import Mixer
from slimstate.core.standard_errors import standard_error
from slimstate.core.state_dtype import SERVED, StateRounding
from slimstate.data.documents import Reading
from slimstate.data.text import Windows
from slimstate.evaluation.associative_recall import associative_recall, recall_change
from slimstate.evaluation.lm_eval import run_tasks
from slimstate.evaluation.options import MeasureOptions
from slimstate.evaluation.perplexity import TextSize, perplexity_of, window_nats
from slimstate.evaluation.state_traces import FinalUtilisation
from slimstate.evaluation.sweep_grid import Candidate, order_rows
from slimstate.evaluation.wikitext import WikiText, add_words
from slimstate.families import loader_of
from slimstate.models.hooks import observed
from slimstate.models.load import Runtime
from slimstate.models.state_rounding import rounded_states
from slimstate.records.base import versions
from slimstate.records.evaluation import UNCUT, Recommendation, Row, SweepRecord, SweepSettings, TaskData, Uncut
from slimstate.records.numbers import is_none, percent, signed
from slimstate.records.parts import Text
from slimstate.records.schema import ValidationError
from slimstate.system.errors import DataError, PlanError, quoted
from slimstate.system.json_files import plain, read_json
from slimstate.system.progress import Reporter
from slimstate.system.value import Value

STATE_WINDOWS = 2  # whose last states give the utilisation
HINT = "choose another `out` or remove it"


RESERVED = frozenset(item.name for kind in (Row, Uncut) for item in fields(kind))  # names of columns


class CandidateModel(Value):
    """A candidate that runs: the uncut model under masks, or a cut.

    The condition numbers are those of the kept keys of every head; None where they are singular.
    """

    runtime: Runtime
    mixers: Sequence[Mixer]
    condition_numbers: Sequence[float | None] = ()


OpenCut = Callable[[Candidate], AbstractContextManager[CandidateModel]]
OnRow = Callable[[Row], None]
Score = Callable[[Any, Any], float | Mapping[str, float]]


class SweepStudy(Value):
    """A sweep before a model is loaded: the candidates, the text to measure on, and the settings."""

    checkpoint: Checkpoint
    candidates: tuple[Candidate, ...]
    text: Reading
    windows: Windows
    size: TextSize
    wikitext: WikiText | None
    options: MeasureOptions
    settings: SweepSettings
    score: Score | None
    reporter: Reporter

    def missing(self, earlier: SweepRecord | None) -> list[Candidate]:
        """Return the candidates that an earlier sweep has not measured."""
        measured = () if earlier is None else {row.key for row in earlier.rows}
        return [candidate for candidate in self.candidates if candidate.key not in measured]

    def record(self, uncut: Uncut, rows: Sequence[Row], kernels: str | None) -> SweepRecord:
        """Return the record of these rows, in the order of the candidates."""
        model_type, mixer = self.checkpoint.family.model_type, self.checkpoint.mixers[0]
        return SweepRecord(
            model=self.checkpoint.source, model_type=model_type, loader=loader_of(model_type), width=mixer.axis.width,
            value_dim=mixer.value_dim, settings=self.settings, versions=versions(), seed=self.settings.seed,
            kernels=kernels, uncut=uncut, rows=order_rows(rows, self.candidates),
        )  # fmt: skip

    def measure(
        self, runtime: Runtime, open_cut: OpenCut, earlier: SweepRecord | None, path: Path, on_row: OnRow
    ) -> SweepRecord:
        """Measure the missing candidates and write the record to `path` after every row; `on_row` gets all rows."""
        whole = CandidateModel(runtime=runtime, mixers=self.checkpoint.mixers)
        rows: list[Row] = []
        if earlier is None:
            width = self.checkpoint.mixers[0].axis.width
            scores, nats = self._measure(whole, (width, None), UNCUT, StateRounding())
            uncut = Uncut(**scores, window_nats=tuple(nats))
        else:
            uncut, rows = earlier.uncut, list(order_rows(earlier.rows, self.candidates))
        for state_dtype in dict.fromkeys(candidate.state_dtype for candidate in self.missing(earlier)):
            if (advice := StateRounding(dtype=state_dtype, every=self.options.state_every).advice()) is not None:
                self.reporter.say(advice)
        for row in rows:
            on_row(row)
        for row in self._rows(self.missing(earlier), whole, open_cut, uncut):
            rows.append(row)
            self.record(uncut, rows, runtime.kernels).write(path)
            on_row(row)
        return self.record(uncut, rows, runtime.kernels)

    def _rows(
        self, candidates: Sequence[Candidate], whole: CandidateModel, open_cut: OpenCut, uncut: Uncut
    ) -> Iterator[Row]:
        """Yield the row of every candidate; a cut is made once for all data types of its states."""
        for cut, same in itertools.groupby(candidates, lambda candidate: candidate.cut):
            if cut.selector is None:
                yield from (self._row(candidate, whole, uncut) for candidate in same)
            else:
                with open_cut(cut) as model:
                    yield from (self._row(candidate, model, uncut) for candidate in same)

    def _row(self, candidate: Candidate, model: CandidateModel, uncut: Uncut) -> Row:
        assert uncut.nats_per_token is not None, "of a sweep that can be continued"
        rounding = StateRounding(dtype=candidate.state_dtype, every=self.options.state_every)
        several = len({each.state_dtype for each in self.candidates}) > 1
        name = " ".join(map(str, candidate.key if several else candidate.key[:3]))
        label = f"row {self.candidates.index(candidate) + 1} of {len(self.candidates)}: {name}"
        measures, nats = self._measure(model, (candidate.key_dim, candidate.value_dim), label, rounding)
        kappas = [math.inf if kappa is None else kappa for kappa in model.condition_numbers]
        recall, other = measures.get("associative_recall"), uncut.associative_recall
        change, error = (None, None) if recall is None or other is None else recall_change(recall, other)
        return Row(
            method=candidate.method,
            score=candidate.score,
            compression=candidate.compression,
            state_dtype=candidate.state_dtype,
            value_dim=candidate.value_dim,
            **measures,
            nats_over_uncut=measures["nats_per_token"] - uncut.nats_per_token,
            nats_error=standard_error(nats, uncut.window_nats),
            recall_over_uncut=change,
            recall_error=error,
            kappa=plain(statistics.median_high(kappas)) if kappas else None,
            kappa_worst=plain(max(kappas)) if kappas else None,
        )

    def _measure(
        self, model: CandidateModel, dims: tuple[int, int | None], label: str, rounding: StateRounding
    ) -> tuple[dict[str, Any], list[float]]:
        """Return what the uncut model and the rows share, by the names of the records, and the nats of each window."""
        key_dim, rank = dims[0], min(dim for dim in dims if dim is not None)
        states, network, seed = FinalUtilisation(rank, STATE_WINDOWS), model.runtime.model, self.settings.seed or 0
        more: dict[str, Any] = {}
        with rounded_states(network, model.mixers, rounding):
            with observed(network, model.mixers, states.add_reading):
                by_window = window_nats(model.runtime, self.windows.tokens, self.reporter, label)
            nats = statistics.fmean(by_window)
            scores = add_words(self.size.scores(nats), self.wikitext, model.runtime)
            if sequences := self.settings.recall:
                more["associative_recall"] = associative_recall(
                    model.runtime, self.text, sequences=sequences, seed=seed, reporter=self.reporter
                )
            if self.options.tasks:
                more["lm_eval"] = run_tasks(model.runtime, self.options, seed=seed)
            if self.score is not None:
                more["user_scores"] = _named(self.score(network, model.runtime.tokenizer), self.settings.function)
        measures = {
            "key_dim": key_dim,
            "state_bytes": rounding.state_bytes(self.checkpoint.mixers, *dims),
            "perplexity": perplexity_of(nats),
            "nats_per_token": nats,
            "rank_utilisation": states.mean,
            **more,
            **vars(scores),
        }
        return measures, by_window


def check_score(score: Score) -> None:
    """Raise a `PlanError` if the user's function cannot be called with a model and its tokenizer."""
    try:
        inspect.signature(score).bind(None, None)
    except (TypeError, ValueError) as error:
        raise PlanError(f"`score` must be a function of the model and its tokenizer: {error}") from error


def _named(scores: Any, name: str | None) -> dict[str, float]:
    """Return the result of the user's function as numbers by name."""
    numbers = scores if isinstance(scores, Mapping) else {name: scores}
    try:
        values = {str(label): float(value) for label, value in numbers.items()}
    except (TypeError, ValueError):
        values = {}
    if not values or not all(map(math.isfinite, values.values())):
        raise DataError(f"`score` must return a finite number, or several by name, got {quoted(repr(scores))}")
    for label in values:
        if label in RESERVED or "|" in label or "\n" in label:
            problem = "must not return a name that is a column of the sweep, or has a | or a line end"
            raise DataError(f"`score` {problem}, got {quoted(label)}")
    return values


def read_earlier(path: Path, settings: SweepSettings) -> SweepRecord | None:
    """Return what an interrupted sweep with the same settings has measured, or None where there was none."""
    if not path.exists():
        return None
    try:
        record = SweepRecord.from_json(read_json(path, DataError))
    except ValidationError as error:
        raise DataError(f"{path} is not a sweep that can be continued ({error}): {HINT}") from error
    measured = ("perplexity", "nats_per_token", "rank_utilisation", "nats_over_uncut")  # a report can do with fewer
    if None in (record.uncut.nats_per_token, *(getattr(row, name) for row in record.rows for name in measured)):
        raise DataError(f"{path} is not a sweep that can be continued (numbers are missing): {HINT}")
    different = [
        "model" if item.name == "fingerprint" else item.name
        for item in fields(SweepSettings)
        if _content(getattr(record.settings, item.name)) != _content(getattr(settings, item.name))
    ]
    if different:
        raise DataError(f"{path} is a sweep with another {', '.join(different)}: {HINT}")
    return record


def _content(setting: object) -> object:
    """Return the part of a setting that decides a result: of texts and files their digest, not their path."""
    if isinstance(setting, Mapping):
        return {name: _content(part) for name, part in setting.items()}
    if isinstance(setting, TaskData):
        return setting.digest or setting.path
    return setting.digest if isinstance(setting, Text) else setting


def recommend(record: SweepRecord, max_loss: float, command: Callable[[Row], str]) -> Recommendation:
    """Recommend the smallest state in bytes whose loss is within `max_loss`, or else the row with the smallest loss.

    Of losses that are equal within two standard errors, the smaller state counts. Controls are never recommended; nor
    are data types that no engine supports yet, unless nothing else was measured.
    """
    rows = [row for row in record.rows if not row.is_control]
    if not rows:
        reason = "only controls were measured; add a method, such as drrqr"
        return Recommendation(within=False, max_loss=max_loss, reason=reason)
    rows = [row for row in rows if row.state_dtype in SERVED] or rows
    within, least = [row for row in rows if _loss(row) <= max_loss], min(rows, key=_loss)
    near = [row for row in rows if row is least or _loss(row) - _loss(least) <= 2 * _error(row, least)]
    row = min(within or near, key=lambda row: (row.state_bytes, _loss(row)))
    share = f"{1 - row.state_bytes / record.uncut.state_bytes:.0%} less state"
    saved = f"{share} for {signed(_loss(row), row.nats_error, ' nats per token')}"
    stored = "" if row.state_dtype == "float32" else f", states stored in {row.state_dtype}"
    cut = "no cut" if row.method == UNCUT else f"{row.method} at key dim {row.dims}"
    if within:
        reason = f"{cut}{stored}: {saved}, the smallest state within {max_loss:g} nats of the uncut model"
    else:
        none = "no cut" if record.state_dtypes == ("float32",) else "nothing"
        smallest = f"the smallest loss{'' if row is least else ', within its error,'} is {cut}{stored}: {saved}"
        reason = f"{none} stays within {max_loss:g} nats of the uncut model; {smallest}"
    for control in (other for other in record.rows if other.is_control and other.dims == row.dims):
        if _loss(row) - _loss(control) > 2 * _error(row, control):
            reason += f"; the control {control.method} loses less, {signed(_loss(control), control.nats_error)}"
    is_certain = row.method == UNCUT or row.nats_error is not None
    reason += "" if is_certain else "; one window gives no standard error: measure on more text"
    recalls = [result.associative_recall for result in (record.uncut, row)]
    if row.recall_over_uncut is not None and None not in recalls:
        change = " to ".join(percent(recall.mean) for recall in recalls if recall is not None)
        lost = row.recall_over_uncut < 0 and not is_none(row.recall_over_uncut, row.recall_error)
        recall = f"associative recall {'falls from ' if lost else ''}{change}"
        reason += f"; {recall}, {signed(row.recall_over_uncut, row.recall_error)}"
    reason += "; recall was not measured" if row.associative_recall is None else ""
    place = record.rows.index(row)
    return Recommendation(row=place, within=bool(within), max_loss=max_loss, reason=reason, command=command(row))


def _loss(row: Row) -> float:
    """Return the nats per token over the uncut model; a row without them is never recommended."""
    return math.inf if row.nats_over_uncut is None else row.nats_over_uncut


def _error(*rows: Row) -> float:
    """Return the standard error of the difference between the losses of rows."""
    return math.hypot(*(row.nats_error or 0.0 for row in rows))
