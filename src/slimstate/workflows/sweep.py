"""`slimstate sweep`: measure what every method would cost at every key dim, from one calibration.

config -> SweepStudy -> evidence -> rows -> tables and figure      cuts are masks, or reconstructed models
"""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from slimstate.data.options import TextSource
from slimstate.data.rows import as_text_source
from slimstate.evaluation.options import GridOptions, MeasureOptions
from slimstate.models.options import RunOptions
from slimstate.pruning.options import Calibration, CalibrationText, CutOptions
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.system.errors import PlanError
from slimstate.system.options import Options, prefixed
from slimstate.workflows.inputs import Inputs, Model, Progress

if TYPE_CHECKING:
    from slimstate.checkpoints.reader import Checkpoint
    from slimstate.core.evidence import EvidenceFile
    from slimstate.data.text import Windows
    from slimstate.evaluation.sweep import CandidateModel, SweepStudy
    from slimstate.evaluation.sweep_grid import Candidate
    from slimstate.models.load import Runtime
    from slimstate.pruning.planning import SelectionJob
    from slimstate.records.evaluation import Measure, Row, SweepRecord
    from slimstate.records.plan import Plan
    from slimstate.system.progress import Reporter

SWEEP, EVIDENCE, CANDIDATES = "sweep.json", "evidence.safetensors", "candidates"
DRAWN = ("sweep.*", "ablation.*", "pareto.*")
ENGINE_OPTION = "mamba-ssm-cache-dtype"  # data type of the states in vLLM
COLUMNS = (
    "method", "score", "compression", "key dim", "state", "per token", "per word", "bits per byte", "nats over uncut",
    "utilisation", "kappa",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SweepConfig(Options):
    """What to sweep, and what to measure it on"""

    text: TextSource = None
    """Text to predict: a .txt, .jsonl or .parquet file (also .gz or .xz), a folder of them, or a datasets name."""
    text_length: Annotated[int, Meta(ge=2)] = 1024
    """Tokens per window of --text."""
    max_loss: Annotated[float, Meta(ge=0, le=1000)] = 0.1
    """Nats per token that a recommended cut may cost."""
    reconstruct: ReconstructOptions | None = None
    """Measure every cut after a reconstruction on --data."""
    grid: GridOptions = GridOptions()
    calibration: CalibrationText = CalibrationText()
    cut: CutOptions = CutOptions()
    measures: MeasureOptions = MeasureOptions()
    run: RunOptions = RunOptions()

    def check(self) -> None:
        if self.text is not None:
            object.__setattr__(self, "text", as_text_source(self.text))
        if getattr(self.calibration, "evidence", None) is not None:
            raise PlanError("a sweep keeps its evidence in `out`: leave out `evidence`")
        if self.reconstruct is not None and self.calibration.data is None:
            raise PlanError("`reconstruct` trains on text: give it with `data`")


def sweep(
    model: Model, out: str | Path, config: SweepConfig | None = None, *,
    tokenizer: Any = None, progress: Progress = True, **options: Any,
) -> SweepRecord:  # fmt: skip
    """Measure what every method would cost at every key dim, from one calibration and without writing a model.

    Several processes share the calibration; the main one measures and writes.

    Parameters:
        model: A model folder, a hub id, or a transformers model in memory.
        out: Folder for records, tables and the figure; an interrupted sweep continues there.
        config: A `SweepConfig`; its options can also be given by name.
        tokenizer: The tokenizer of a model in memory.
        progress: Whether to show progress, or a `Reporter` of your own.
        options: Options of the config by name, which override it.

    Returns:
        A record: `rows`, `uncut`, `recommended`; `to_dataframe()` has a row for every cut.

    Examples:
        >>> record = slimstate.sweep("demo/model", "records", text="demo/evaluation.txt", data="demo/calibration.txt",
        ...                          methods=["drrqr", "l1"], key_dims=[64, 32])
        >>> record.to_dataframe().plot.scatter("key_dim", "perplexity")
    """
    config = SweepConfig.merge(config, options)
    if config.text is None:
        raise PlanError("a sweep measures on text: give it with `text`")
    with Inputs(progress, tokenizer, model) as inputs:
        return _sweep(inputs.model(model), Path(out), config, inputs.reporter)


def _sweep(source: str | PathLike[str], folder: Path, config: SweepConfig, reporter: Reporter) -> SweepRecord:
    from slimstate.checkpoints.reader import Checkpoint
    from slimstate.evaluation.sweep_grid import grid_of
    from slimstate.evaluation.sweep_results import recommend
    from slimstate.records.folder import check_drawn
    from slimstate.records.provenance import run_config
    from slimstate.report.plots import draw_sweep
    from slimstate.system import distributed
    from slimstate.system.atomic import check_place, staged_files
    from slimstate.system.interruption import STOP

    started, checkpoint = time.perf_counter(), Checkpoint.open(source)
    check_place(folder, folder=True)
    check_drawn(folder, DRAWN, beside=SWEEP)
    with STOP.saying(lambda: _describe_progress(folder)):
        record = _measure(checkpoint, folder, config, reporter)
    covering = replace(config, grid=grid_of(record.rows, record.width))
    record = replace(
        record,
        recommended=recommend(record, config.max_loss, lambda row: command_for(row, source, folder, config)),
        config=run_config("sweep", {"model": source, "out": folder}, covering.to_values()),
        seconds=time.perf_counter() - started,
    )

    def write() -> None:
        with staged_files(folder) as place:
            record.write(place / SWEEP)
            draw_sweep(record, place)

    distributed.from_main(write)
    return replace(record, out=str(folder))


def _describe_progress(folder: Path) -> str | None:
    """Return what an interrupted sweep has in its folder, or None."""
    if (folder / SWEEP).exists():
        return f"{folder / SWEEP} keeps the rows that were measured; the same command continues"
    if (folder / EVIDENCE).exists():
        return f"{folder / EVIDENCE} is kept; the same command continues"
    return None


def command_for(row: Row, source: str | PathLike[str], folder: Path, config: SweepConfig) -> str:
    """Return the command that makes the cut of a row, or that serves the uncut model with other states."""
    from slimstate.records.evaluation import UNCUT
    from slimstate.records.provenance import command_line, run_config
    from slimstate.workflows.prune import PruneConfig

    if row.method == UNCUT:
        return shlex.join(["vllm", "serve", str(source), f"--{ENGINE_OPTION}", row.state_dtype])
    values = {"key_dim": row.key_dim, "method": row.method, "score": row.score, "seed": config.calibration.seed}
    if config.calibration.data is not None:
        values["evidence"] = folder / EVIDENCE
    if config.reconstruct is not None:
        values |= config.calibration.to_values()
    cut = replace(PruneConfig.from_values(values), cut=config.cut, reconstruct=config.reconstruct)
    return command_line(run_config("prune", {"model": source, "out": "SLIM"}, cut.to_values()))


def _calibration(config: SweepConfig, folder: Path) -> Calibration:
    """Return the calibration with its evidence in the folder of the sweep."""
    return Calibration(**{**vars(config.calibration), "evidence": folder / EVIDENCE})


def _measure(checkpoint: Checkpoint, folder: Path, config: SweepConfig, reporter: Reporter) -> SweepRecord:
    """Return the rows of an earlier sweep and those that were missing, in the order of the grid."""
    from slimstate.evaluation.sweep_grid import Grid
    from slimstate.evaluation.sweep_results import read_earlier
    from slimstate.models.load import load, load_tokenizer
    from slimstate.models.options import LoadOptions
    from slimstate.pruning.evidence import EvidenceCollector, calibration_windows
    from slimstate.pruning.planning import check_rotatable
    from slimstate.system import distributed

    if config.reconstruct is not None and distributed.count() > 1:
        raise PlanError("a sweep with `reconstruct` must run in one process")
    grid, calibration = Grid.of(config.grid, checkpoint.mixers[0].axis.width, reporter), _calibration(config, folder)
    for selector in grid.selectors:
        check_rotatable(checkpoint, selector)
    needs, tokenizer = grid.needs(calibration.data is not None), load_tokenizer(checkpoint.folder)
    windows = None if calibration.data is None else calibration_windows(calibration, tokenizer)
    study = _study(checkpoint, config, tuple(grid.candidates()), windows, reporter)
    earlier, count = read_earlier(folder / SWEEP, study.settings), len(study.candidates)
    missing = len(study.missing(earlier))
    if earlier is not None:
        reporter.say(f"{count - missing} of {count} rows are in {folder / SWEEP} already")
        if not missing:
            return study.record(earlier.uncut, earlier.rows, earlier.kernels)
    with reporter.waiting("loading the model"):
        runtime = load(checkpoint.folder, device=config.run.device, dtype=config.run.dtype)
    reporter.say(f"kernels: {runtime.kernels}")
    run = LoadOptions(device=config.run.device, dtype=config.run.dtype)
    collector = EvidenceCollector(calibration=calibration, windows=windows, run=run, runtime=runtime)
    evidence, _ = collector.collect(checkpoint, needs, reporter)
    cuts = _Cuts(
        config=config, checkpoint=checkpoint, calibration=calibration, windows=windows, evidence=evidence,
        runtime=runtime, folder=folder / CANDIDATES, reporter=reporter,
    )  # fmt: skip

    def measure() -> SweepRecord:
        with reporter.table((*COLUMNS, *study.settings.tasks)) as table:
            return study.measure(runtime, cuts.open, earlier, folder / SWEEP, lambda row: table(_cells(row)))

    return distributed.from_main(measure)


def _study(
    checkpoint: Checkpoint, config: SweepConfig, candidates: tuple[Candidate, ...], windows: Windows | None,
    reporter: Reporter,
) -> SweepStudy:  # fmt: skip
    """Read the text, find the tasks and the fingerprint; `windows` are those of the calibration."""
    from slimstate.data.documents import Reading
    from slimstate.evaluation.perplexity import TextSize, evaluation_windows
    from slimstate.evaluation.sweep import SweepStudy
    from slimstate.evaluation.task_sources import find_sources
    from slimstate.models.load import load_tokenizer
    from slimstate.records.evaluation import SweepSettings
    from slimstate.records.parts import Text

    tokenizer, measures, run = load_tokenizer(checkpoint.folder), config.measures, config.run
    sources, text = find_sources(measures), Reading(config.text, config.calibration.documents)
    measured = evaluation_windows(tokenizer, text, config.text_length, measures.max_tokens, option="text_length")
    reconstruction = None
    if config.reconstruct is not None:
        reconstruction = config.reconstruct.settings(run.place.type, _training_windows(config, tokenizer))
    with reporter.waiting("reading the weights for their fingerprint"):
        fingerprint = checkpoint.fingerprint
    settings = SweepSettings(
        fingerprint=fingerprint,
        calibration=None if windows is None else Text(**windows.describe()),
        text=Text(**measured.describe()),
        f=config.cut.rrqr_f,
        seed=config.calibration.seed,
        device=run.place.type,
        dtype=run.precision_name,
        keep_norm_eps=config.cut.keep_norm_eps,
        tasks={source.task: source.data for source in sources},
        limit=measures.limit,
        max_length=measures.max_length,
        reconstruct=reconstruction,
        state_every=measures.state_every,
    )
    return SweepStudy(
        checkpoint=checkpoint, candidates=candidates, windows=measured, size=TextSize.of(tokenizer, measured.tokens),
        options=measures, settings=settings, reporter=reporter,
    )  # fmt: skip


def _training_windows(config: SweepConfig, tokenizer: Any) -> Windows:
    """Return the windows that every reconstruction trains on."""
    from slimstate.data.documents import Reading

    text = config.calibration
    assert config.reconstruct is not None
    with prefixed("reconstruct_", ReconstructOptions):
        reading = Reading(text.data, text.documents)
        return config.reconstruct.windows(tokenizer, reading, text.seed, config.run.place.type)


@dataclass(frozen=True, kw_only=True)
class _Cuts:
    """Turns candidates into models: masks on the uncut model, or cuts that are reconstructed in `folder`."""

    config: SweepConfig
    checkpoint: Checkpoint
    calibration: Calibration
    windows: Windows | None
    evidence: EvidenceFile | None
    runtime: Runtime
    folder: Path
    reporter: Reporter

    @contextmanager
    def open(self, candidate: Candidate) -> Iterator[CandidateModel]:
        """Yield the model of a candidate; a reconstruction that an interrupted sweep has made is used again."""
        from slimstate.checkpoints.reader import Checkpoint
        from slimstate.evaluation.sweep import CandidateModel
        from slimstate.models.hooks import masked
        from slimstate.models.load import load
        from slimstate.records.training import RECONSTRUCTION

        job = self._job(candidate)
        plan = job.choose(self.evidence)
        kappas, mixers = _condition_numbers(plan), self.checkpoint.mixers
        if self.config.reconstruct is None:
            with masked(self.runtime.model, mixers, plan.selections, rescaled=not job.corrected):
                yield CandidateModel(runtime=self.runtime, mixers=mixers, condition_numbers=kappas)
            return
        out = self.folder / f"{plan.method}-{plan.score}-{plan.key_dim}"
        if not (out / RECONSTRUCTION).is_file():
            self._reconstruct(job, plan, out)
        runtime = load(out, device=self.config.run.device, dtype=self.config.run.dtype)
        yield CandidateModel(runtime=runtime, mixers=Checkpoint.open(out).mixers, condition_numbers=kappas)
        shutil.rmtree(out)
        with suppress(OSError):  # another candidate is still there
            self.folder.rmdir()

    def _job(self, candidate: Candidate) -> SelectionJob:
        from slimstate.models.options import LoadOptions
        from slimstate.pruning.planning import SelectionJob, is_corrected
        from slimstate.selectors import Request

        cut, run = self.config.cut, self.config.run
        assert candidate.selector is not None
        return SelectionJob(
            checkpoint=self.checkpoint, selector=candidate.selector, calibration=self.calibration,
            request=Request(
                keep=candidate.key_dim, score=candidate.score, seed=self.calibration.seed, f=cut.rrqr_f
            ),
            corrected=is_corrected(self.checkpoint, cut.keep_norm_eps), windows=self.windows,
            run=LoadOptions(device=run.device, dtype=run.dtype),
        )  # fmt: skip

    def _reconstruct(self, job: SelectionJob, plan: Plan, out: Path) -> None:
        from slimstate.models.load import load_tokenizer
        from slimstate.workflows.prune import CutReconstruction

        assert self.config.reconstruct is not None
        windows = _training_windows(self.config, load_tokenizer(self.checkpoint.folder))
        run = CutReconstruction(out=out, options=self.config.reconstruct, force=False, provenance={})
        run.finish(replace(job, reporter=self.reporter), plan, windows, time.perf_counter())


def _condition_numbers(plan: Plan) -> list[float]:
    """Return those of the kept keys of every head; infinity where they are singular."""
    choices = plan.selections.values()
    kappas = (kappa for choice in choices for kappa in choice.certificate.get("condition_after", ()))
    return [math.inf if kappa is None else kappa for kappa in kappas]


def _cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table that shows progress."""
    from slimstate.records.numbers import fixed, perplexity

    def cell(measure: Measure) -> str:
        return "" if measure.value is None else f"{measure.label} {measure.value:.4g}"

    candidate = (row.method, row.score, f"{row.compression:.4g}", str(row.key_dim), row.state_dtype)
    units = (perplexity(row.perplexity), perplexity(row.word_perplexity), fixed(row.bits_per_byte, 4))
    kappa = "" if row.kappa is None else f"{row.kappa:,.0f}"
    tasks = () if row.lm_eval is None else tuple(map(cell, row.lm_eval.chief_measures()))
    return *candidate, *units, f"{row.nats_over_uncut:+.3f}", f"{row.rank_utilisation:.3f}", kappa, *tasks
