"""Many methods and key dims from one calibration, scored by masking: what each cut would cost, before any is made.

The folder holds the evidence and `sweep.json`, which grows by a row as soon as it is measured: a sweep that was
stopped goes on where it was.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.evidence import EvidenceFile, Need
from slimstate.core.state_dtype import StateRounding
from slimstate.data.documents import Reading, check_documents
from slimstate.data.rows import Texts, as_text_source
from slimstate.data.text import Windows
from slimstate.evaluation.compare import text_of
from slimstate.evaluation.lm_eval import run_tasks
from slimstate.evaluation.perplexity import TextSize, evaluation_windows, mean_nats, perplexity_of
from slimstate.evaluation.state_traces import FinalUtilisation
from slimstate.evaluation.sweep_candidates import Candidates, Running
from slimstate.evaluation.sweep_grid import Candidate, SweepGrid, as_asked, covering, still_to_do
from slimstate.evaluation.sweep_results import (
    CANDIDATES,
    EVIDENCE,
    SWEEP,
    earlier_sweep,
    in_all_units,
    recommend,
    reconstruction_flags,
)
from slimstate.evaluation.task_sources import TaskOptions, resolve, sources
from slimstate.families import loader_of
from slimstate.models.hooks import observed
from slimstate.models.load import Runtime, load, load_tokenizer
from slimstate.models.options import LoadOptions, RunOptions
from slimstate.models.state_rounding import rounded_states
from slimstate.pruning.budget import stored_bytes
from slimstate.pruning.evidence import EvidenceCollector, calibration_windows
from slimstate.pruning.options import Calibration
from slimstate.pruning.planning import SelectionJob, check_rotatable, is_corrected
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.records.base import versions
from slimstate.records.evaluation import LmEval, Measure, TaskData
from slimstate.records.ownership import check_drawn
from slimstate.records.parts import TextScores
from slimstate.records.plan import Plan
from slimstate.records.provenance import run_config
from slimstate.records.reconstruction import ReconstructionSettings
from slimstate.records.sweep import UNCUT, Row, SweepRecord, SweepSettings, Uncut
from slimstate.report.numbers import fixed, perplexity
from slimstate.report.tables import write_tables
from slimstate.selectors import Request
from slimstate.system import distributed
from slimstate.system.atomic import check_place, staged_files
from slimstate.system.errors import PlanError
from slimstate.system.interruption import STOP
from slimstate.system.options import prefixed
from slimstate.system.progress import SILENT, Reporter

DRAWN = ("sweep.*", "ablation.*", "pareto.*")
STATES_OF = 2  # windows whose last states tell the utilisation
COLUMNS = (
    "method", "score", "compression", "key dim", "state", "per token", "per word", "bits per byte", "nats over uncut",
    "utilisation", "kappa",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SweepOptions(TaskOptions):
    """What judges a cut, how it would be made, and what a recommended one may cost.

    Parameters:
        text_length: tokens in a window of the text.
        max_tokens: of its beginning; by default all.
        documents: how those of the text are told apart, by default as it suggests: lines, blank, file or rows.
        tasks: names of lm-eval with commas between them, which judge cuts too.
        task_data: a folder of files that take the place of hub datasets.
        limit: documents of each task; by default all.
        max_length: tokens that tasks show a model at once; by default what its config names.
        max_loss: nats per token that a recommended cut may cost.
        f: the exchange threshold of drrqr.
        keep_norm_eps: cuts leave the norm epsilon alone.
        reconstruct: judge every cut as it is after a reconstruction.
        state_every: tokens after which states are stored in a type that loses something: 1 as engines decode.

    Examples:
        >>> slimstate.sweep("model", "records", text="test.txt", options=slimstate.SweepOptions(max_tokens=50_000))
    """

    text_length: int = 1024
    max_tokens: int | None = None
    documents: str | None = None
    tasks: str | None = None
    max_loss: float = 0.1
    f: float = 1.5
    keep_norm_eps: bool = False
    reconstruct: ReconstructOptions | None = None
    state_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        StateRounding(every=self.state_every)
        check_documents(self.documents)
        Request(keep=1, f=self.f)
        if not 0 <= self.max_loss < math.inf:
            raise PlanError(f"`max_loss` {self.max_loss}: it must be a number of nats, 0 or more")


def sweep(
    model: str | PathLike[str],
    out: str | Path,
    *,
    text: str | Path | Iterable[object],
    calibration: Calibration | str | Path | Iterable[object] | None = None,
    grid: SweepGrid | None = None,
    options: SweepOptions | None = None,
    run: RunOptions | None = None,
    reporter: Reporter = SILENT,
) -> SweepRecord:
    """Judge every cut of the grid on `text`; records, tables and a figure go to `out`.

    `calibration` is a text, or says more of it; its seed is for all that is drawn at random. Several processes share
    the calibration; the main one judges and writes, and the others wait for its record.
    """
    from slimstate.report.plots import pareto, save  # matplotlib is an extra

    started, folder, judged_on = time.perf_counter(), Path(out), as_text_source(text)
    grid, options, run = grid or SweepGrid(), options or SweepOptions(), run or RunOptions()
    checkpoint = Checkpoint.open(model)
    check_place(folder, folder=True)
    check_drawn(folder, DRAWN, beside=SWEEP)
    study = _prepare(checkpoint, judged_on, _kept(calibration, folder), grid, options, run, reporter)
    with STOP.saying(lambda: _kept_so_far(folder)):
        record = _measure(study, folder / SWEEP, reporter)
    record = replace(
        record,
        recommended=recommend(record, options.max_loss, folder, str(model)),
        config=_config(study, record.rows, model, judged_on, out),
        seconds=time.perf_counter() - started,
    )

    def write() -> None:
        with staged_files(folder) as place:
            record.write(place / SWEEP)
            write_tables(record, place)
            save(pareto(record), place / "pareto")

    distributed.from_main(write)
    return replace(record, out=str(folder))


def _kept_so_far(folder: Path) -> str | None:
    """What a sweep that is stopped has in its folder."""
    if not (folder / SWEEP).exists():
        return f"{folder / EVIDENCE} is kept; the same command goes on" if (folder / EVIDENCE).exists() else None
    return f"{folder / SWEEP} keeps the rows that were measured; the same command goes on"


def _kept(given: Calibration | str | Path | Iterable[object] | None, folder: Path) -> Calibration:
    """A calibration whose evidence the folder of the sweep keeps."""
    calibration = given if isinstance(given, Calibration) else Calibration(data=given)
    if calibration.evidence is not None:
        raise PlanError("a sweep keeps its evidence in `out`: leave out `evidence`")
    return replace(calibration, evidence=folder / EVIDENCE)


@dataclass(frozen=True, kw_only=True)
class _Study:
    """What is settled before the model is loaded: the cuts to judge, the tokens to judge on, those to calibrate on.

    `size` counts the words and bytes of the tokens to judge on.
    """

    checkpoint: Checkpoint
    candidates: tuple[Candidate, ...]
    needs: frozenset[Need]
    calibration: Calibration
    calibration_windows: Windows | None
    windows: Windows
    size: TextSize
    options: SweepOptions
    run: RunOptions
    settings: SweepSettings

    @property
    def state_dtypes(self) -> frozenset[str]:
        return frozenset(candidate.state_dtype for candidate in self.candidates)

    def record(self, uncut: Uncut, rows: tuple[Row, ...], kernels: str | None) -> SweepRecord:
        """The record as far as it is known."""
        model_type = self.checkpoint.family.model_type
        return SweepRecord(
            model=self.checkpoint.source,
            model_type=model_type,
            loader=loader_of(model_type),
            width=self.checkpoint.mixers[0].axis.width,
            value_dim=self.checkpoint.mixers[0].value_dim,
            settings=self.settings,
            versions=versions(),
            seed=self.settings.seed,
            kernels=kernels,
            uncut=uncut,
            rows=rows,
        )


def _prepare(
    checkpoint: Checkpoint,
    text: str | Texts,
    calibration: Calibration,
    grid: SweepGrid,
    options: SweepOptions,
    run: RunOptions,
    reporter: Reporter,
) -> _Study:
    """Refuse what cannot be done, and read both texts and the fingerprint."""
    for selector in grid.selectors:
        check_rotatable(checkpoint, selector)
    if options.reconstruct is not None and calibration.data is None:
        raise PlanError("`reconstruct` trains on text: give it with `calibration`")
    if options.reconstruct is not None and distributed.count() > 1:
        raise PlanError("a sweep with `reconstruct` is made by one process")
    width = checkpoint.mixers[0].axis.width
    key_dims = grid.resolve(width, reporter)
    needs = grid.needs(calibration.data is not None)
    found = sources(resolve(options.tasks), options.task_folder) if options.tasks else ()
    tokenizer, reading = load_tokenizer(checkpoint.folder), Reading(text, options.documents)
    windows = evaluation_windows(tokenizer, reading, options.text_length, options.max_tokens, named="text_length")
    drawn = None if calibration.data is None else calibration_windows(calibration, tokenizer)
    with reporter.waiting("reading the weights for their fingerprint"):
        fingerprint = checkpoint.fingerprint
    settings = SweepSettings(
        fingerprint=fingerprint,
        calibration=None if drawn is None else text_of(drawn),
        text=text_of(windows),
        f=options.f,
        seed=calibration.seed,
        device=run.place.type,
        dtype=run.precision_name,
        keep_norm_eps=options.keep_norm_eps,
        tasks={source.task: TaskData(path=source.place, digest=source.digest) for source in found},
        limit=options.limit,
        max_length=options.max_length,
        reconstruct=_settings(options.reconstruct, tokenizer, calibration, run),
        state_every=options.state_every,
    )
    return _Study(
        checkpoint=checkpoint, candidates=tuple(grid.candidates(key_dims, width)), needs=needs, calibration=calibration,
        calibration_windows=drawn, windows=windows, size=TextSize.of(tokenizer, windows.tokens),
        options=options, run=run, settings=settings,
    )  # fmt: skip


def _settings(
    options: ReconstructOptions | None, tokenizer: Any, calibration: Calibration, run: RunOptions
) -> ReconstructionSettings | None:
    """What every reconstruction will be made with, once its text was found to be enough."""
    if options is None:
        return None
    place, data = run.place.type, calibration.data
    assert data is not None
    with prefixed("reconstruct_", ReconstructOptions):
        reading = Reading(data, calibration.documents)
        return options.settings(place, options.windows(tokenizer, reading, calibration.seed, place))


def _config(
    study: _Study, rows: Sequence[Row], model: str | PathLike[str], text: str | Texts, out: str | Path
) -> dict[str, Any]:
    """Return the config that measures all rows, also those of an earlier sweep."""
    calibration, options = study.calibration, study.options
    calibrated = {"data": calibration.data, "samples": calibration.samples, "length": calibration.length}
    stored = {} if options.state_every == 1 else {"state_every": options.state_every}
    asked = {
        **covering(rows, study.checkpoint.mixers[0].axis.width), **stored,
        **(calibrated if calibration.data is not None else {}), "text": text, "text_length": options.text_length,
        "max_tokens": options.max_tokens, "documents": options.documents or calibration.documents,
        "tasks": options.tasks, "task_data": options.task_data, "limit": options.limit,
        "max_length": options.max_length, "max_loss": options.max_loss, "seed": calibration.seed, "rrqr_f": options.f,
        "keep_norm_eps": options.keep_norm_eps, **reconstruction_flags(study.settings), **vars(study.run), "out": out,
    }  # fmt: skip
    return run_config("sweep", {"model": model}, asked)


def _measure(study: _Study, path: Path, reporter: Reporter) -> SweepRecord:
    """The rows of an earlier sweep and those that were missing, in the order asked for."""
    earlier = in_all_units(earlier_sweep(path, study.settings), study.size)
    rows = () if earlier is None else as_asked(earlier.rows, study.candidates)
    missing = still_to_do(study.candidates, rows)
    if rows:
        done, all_rows = len(study.candidates) - len(missing), len(study.candidates)
        reporter.say(f"{done} of {all_rows} rows are in {path} already")
    if earlier is not None and not missing:
        return study.record(earlier.uncut, rows, earlier.kernels)
    with reporter.waiting("loading the model"):
        runtime = load(study.checkpoint.folder, device=study.run.device, dtype=study.run.dtype)
    reporter.say(f"kernels: {runtime.kernels}")
    collector = EvidenceCollector(
        calibration=study.calibration,
        windows=study.calibration_windows,
        run=LoadOptions(**vars(study.run)),
        runtime=runtime,
    )
    evidence, _ = collector.collect(study.checkpoint, study.needs, reporter)
    judge = _Judge(study=study, runtime=runtime, evidence=evidence, folder=path.parent, reporter=reporter)

    def judged() -> SweepRecord:
        with reporter.table((*COLUMNS, *study.settings.tasks)) as table:
            uncut = judge.uncut() if earlier is None else earlier.uncut
            record = study.record(uncut, rows, runtime.kernels)
            for row in rows:
                table(_cells(row))
            for row in judge.rows(missing, uncut):
                record = replace(record, rows=(*record.rows, row))
                record.write(path)
                table(_cells(row))
        return replace(record, rows=as_asked(record.rows, study.candidates))

    return distributed.from_main(judged)


class _Measured(TextScores):
    """What both an uncut model and a masked one have, under the names of the records."""

    key_dim: int
    state_bytes: int
    perplexity: float
    nats_per_token: float
    rank_utilisation: float
    lm_eval: LmEval | None


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """Measures a model as it is, and what the candidates make of it, always on the same windows."""

    study: _Study
    runtime: Runtime
    evidence: EvidenceFile | None
    folder: Path
    reporter: Reporter

    def uncut(self) -> Uncut:
        width = self.study.checkpoint.mixers[0].axis.width
        return Uncut(**vars(self._measure(self._as_it_is, width, UNCUT, StateRounding())))

    @property
    def _as_it_is(self) -> Running:
        return self.runtime, self.study.checkpoint.mixers

    @cached_property
    def candidates(self) -> Candidates:
        study, checkpoint = self.study, self.study.checkpoint
        return Candidates(
            checkpoint=checkpoint,
            runtime=self.runtime,
            rescaled=study.options.keep_norm_eps or not checkpoint.family.correction(checkpoint.config).possible,
            reconstruct=study.options.reconstruct,
            calibration=study.calibration,
            run=study.run,
            folder=self.folder / CANDIDATES,
            reporter=self.reporter,
        )

    def rows(self, missing: Sequence[Candidate], uncut: Uncut) -> Iterator[Row]:
        """The row of every candidate; a cut is made once for all types that its states are kept in."""
        for cut, same in itertools.groupby(missing, lambda candidate: candidate.cut):
            if cut.selector is None:
                yield from (self._row(candidate, self._as_it_is, uncut, []) for candidate in same)
                continue
            request = cut.request(self.study.calibration.seed, self.study.options.f)
            job = SelectionJob(
                checkpoint=self.study.checkpoint, selector=cut.selector, request=request,
                corrected=is_corrected(self.study.checkpoint, self.study.options.keep_norm_eps),
                calibration=self.study.calibration, windows=self.study.calibration_windows,
                run=LoadOptions(**vars(self.study.run)), reporter=SILENT,
            )  # fmt: skip
            plan = job.choose(self.evidence)
            with self.candidates.running(job, plan) as running:
                yield from (self._row(each, running, uncut, _condition_numbers(plan)) for each in same)

    def _row(self, candidate: Candidate, running: Running, uncut: Uncut, kappas: Sequence[float]) -> Row:
        assert uncut.nats_per_token is not None, "of a sweep that can go on"
        rounding = StateRounding(dtype=candidate.state_dtype, every=self.study.settings.state_every)
        place = f"row {self.study.candidates.index(candidate) + 1} of {len(self.study.candidates)}"
        name = " ".join(map(str, candidate.key if len(self.study.state_dtypes) > 1 else candidate.key[:3]))
        label = f"{place}: {name}"
        found = self._measure(running, candidate.key_dim, label, rounding)
        return Row(
            method=candidate.method,
            score=candidate.score,
            compression=candidate.compression,
            state_dtype=candidate.state_dtype,
            **vars(found),
            nats_over_uncut=found.nats_per_token - uncut.nats_per_token,
            kappa=_finite(statistics.median_high(kappas)) if kappas else None,
            kappa_worst=_finite(max(kappas)) if kappas else None,
        )

    def _measure(self, running: Running, key_dim: int, label: str, rounding: StateRounding) -> _Measured:
        runtime, mixers = running
        states = FinalUtilisation(key_dim, STATES_OF)
        with rounded_states(runtime.model, mixers, rounding):
            with observed(runtime.model, mixers, states.see):
                nats = mean_nats(runtime, self.study.windows.tokens, self.reporter, label)
            tasks = self._tasks(runtime)
        return _Measured(
            key_dim=key_dim,
            state_bytes=stored_bytes(self.study.checkpoint.mixers, key_dim, rounding),
            perplexity=perplexity_of(nats),
            nats_per_token=nats,
            rank_utilisation=states.mean,
            lm_eval=tasks,
            **vars(self.study.size.predicted(nats)),
        )

    def _tasks(self, runtime: Runtime) -> LmEval | None:
        """What `evaluate` finds for the tasks, of a model under whatever masks it has now."""
        settings, options = self.study.settings, self.study.options
        if not settings.tasks:
            return None
        names, seed = tuple(settings.tasks), self.study.calibration.seed
        return run_tasks(
            runtime,
            names,
            data=options.task_folder,
            limit=options.limit,
            seed=seed,
            max_length=options.max_length,
        )


def _condition_numbers(plan: Plan) -> list[float]:
    """Of the kept keys of every head; singular ones count as infinite."""
    found = (kappa for choice in plan.selections.values() for kappa in choice.certificate.get("condition_after", ()))
    return [math.inf if kappa is None else kappa for kappa in found]


def _finite(value: float) -> float | None:
    """As a record has it."""
    return value if math.isfinite(value) else None


def _cells(row: Row) -> tuple[str, ...]:
    kappa = "" if row.kappa is None else f"{row.kappa:,.0f}"
    units = (perplexity(row.perplexity), perplexity(row.word_perplexity), fixed(row.bits_per_byte, 4))
    numbers = (f"{row.nats_over_uncut:+.3f}", f"{row.rank_utilisation:.3f}", kappa)
    tasks = () if row.lm_eval is None else tuple(map(_told, row.lm_eval.chief_measures()))
    what = (row.method, row.score, f"{row.compression:.4g}", str(row.key_dim), row.state_dtype)
    return *what, *units, *numbers, *tasks


def _told(measure: Measure) -> str:
    return "" if measure.value is None else f"{measure.label} {measure.value:.4g}"
