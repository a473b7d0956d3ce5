"""`slimstate sweep`: measure what every method would cost at every key dim, from one calibration.

config -> SweepStudy -> evidence -> rows -> tables and figure      cuts are masks, or reconstructed models
"""

import itertools
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.evidence import EvidenceFile
from slimstate.data.sources import is_same_text
from slimstate.data.text import Windows
from slimstate.evaluation.associative_recall import SEQUENCES, recall_tokens
from slimstate.evaluation.perplexity import TextSize, evaluation_windows
from slimstate.evaluation.sweep import CandidateModel, Score, SweepStudy, check_score, read_earlier, recommend
from slimstate.evaluation.sweep_grid import Candidate, Grid, grid_of
from slimstate.evaluation.task_sources import find_sources
from slimstate.evaluation.wikitext import WikiText, read_wikitext
from slimstate.models.hooks import masked
from slimstate.models.load import Runtime, load, load_tokenizer
from slimstate.models.options import LoadOptions
from slimstate.pruning.evidence import EvidenceCollector, calibration_windows
from slimstate.pruning.options import Calibration
from slimstate.pruning.planning import check_rotatable
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.reconstruction.rates import reconstruction_tokens
from slimstate.records.evaluation import UNCUT, Row, SweepRecord, SweepSettings
from slimstate.records.folder import check_drawings
from slimstate.records.numbers import dims_text, perplexity, plural, signed
from slimstate.records.parts import Text
from slimstate.records.provenance import command_line, run_config
from slimstate.records.training import ReconstructionRecord
from slimstate.selectors import Selector, selector_named, value_selector_named
from slimstate.system import distributed
from slimstate.system.atomic import check_place, staged_files
from slimstate.system.errors import PlanError
from slimstate.system.interruption import STOP
from slimstate.system.options import as_path, prefixed
from slimstate.system.progress import SILENT, Reporter
from slimstate.workflows.inputs import Inputs, Model, Progress
from slimstate.workflows.options import PruneConfig, SweepConfig
from slimstate.workflows.prune import prune, report_unused, selection_job

SWEEP, EVIDENCE, CANDIDATES = "sweep.json", "evidence.safetensors", "candidates"
OUTPUTS = ("sweep.*", "ablation.*", "pareto.*")
ENGINE_OPTION = "mamba-ssm-cache-dtype"  # data type of the states in vLLM
COLUMNS = ("method", "score", "key dim", "state", "perplexity per token", "nats over uncut")


def sweep(
    model: Model, out: str | Path, config: SweepConfig | None = None, *,
    score: Score | None = None, tokenizer: Any = None, progress: Progress = True, **options: Any,
) -> SweepRecord:  # fmt: skip
    """Measure what every method would cost at every key dim, from one calibration and without writing a model.

    Several processes share the calibration; the main one measures and writes.

    Parameters:
        model: A model folder or a hub id. In Python also a transformers model in memory.
        out: Folder for records, tables and the figure; an interrupted sweep continues there.
        score: A function of the model and its tokenizer that returns a number, or several by name: one more column of
            the record and the tables for each. Differences have their sign; higher is not taken to be better.

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
    if score is not None:
        check_score(score)
    from slimstate.reports.plots.results import draw_sweep

    started, folder = time.perf_counter(), as_path(out)
    with Inputs(progress, tokenizer, model) as inputs, STOP.with_message(lambda: _describe_progress(folder)):
        source = inputs.model(model)
        checkpoint = Checkpoint.open(source)
        checkpoint.check_plain("swept")
        check_place(folder, folder=True)
        check_drawings(folder, OUTPUTS, beside=SWEEP)
        record = _measure(source, checkpoint, folder, config, score, inputs.reporter)
    grid = replace(grid_of(record.rows, record.width), value_method=config.grid.value_method)
    all_rows = replace(config, grid=grid)  # also those of an earlier sweep
    record = replace(
        record,
        recommended=recommend(record, config.max_loss, lambda row: command_for(row, source, folder, config)),
        config=run_config("sweep", {"model": source, "out": folder}, all_rows.to_values()),
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
    """Return the command that repeats the cut of a row, or serves the uncut model with states in another dtype."""
    if row.method == UNCUT:
        return shlex.join(["vllm", "serve", str(source), f"--{ENGINE_OPTION}", row.state_dtype])
    cut = cut_config(row.method, row, folder, config)
    values = None if row.value_dim is None else config.grid.value_method or "energy"
    needs = [selector_named(row.method).needs, *([] if values is None else [value_selector_named(values).needs])]
    if cut.reconstruct is None and not frozenset().union(*needs) - {"weight"}:
        cut = replace(cut, calibration=Calibration(seed=cut.calibration.seed))
    return command_line(run_config("prune", {"model": source, "out": "SLIM"}, cut.to_values()))


def cut_config(method: str | Selector, cut: Row | Candidate, folder: Path, config: SweepConfig) -> PruneConfig:
    """Return the config of `prune` for a cut from the evidence in the folder of the sweep."""
    calibration = _calibration(config, folder)
    if config.reconstruct is None:  # which alone needs the text again
        calibration = Calibration(seed=calibration.seed, evidence=calibration.evidence)
    score: Any = cut.score
    return PruneConfig(
        key_dim=cut.key_dim, value_dim=cut.value_dim, method=method, score=score, reconstruct=config.reconstruct,
        value_method=None if cut.value_dim is None else config.grid.value_method, calibration=calibration,
        cut=config.cut, run=LoadOptions(**vars(config.run)),
    )  # fmt: skip


def _calibration(config: SweepConfig, folder: Path) -> Calibration:
    """Return the calibration with its evidence in the folder of the sweep, where it has a text."""
    evidence = None if config.calibration.data is None else folder / EVIDENCE
    return Calibration(**{**vars(config.calibration), "evidence": evidence})


def _measure(
    source: str | PathLike[str], checkpoint: Checkpoint, folder: Path, config: SweepConfig, score: Score | None,
    reporter: Reporter,
) -> SweepRecord:  # fmt: skip
    """Return the rows of an earlier sweep and those that were missing, in the order of the grid."""
    if config.reconstruct is not None and distributed.count() > 1:
        raise PlanError("a sweep with `reconstruct` must run in one process")
    first, calibration = checkpoint.mixers[0], _calibration(config, folder)
    grid, has_text = Grid.of(config.grid, first.axis.width, first.value_dim, reporter), calibration.data is not None
    for selector in grid.selectors:
        check_rotatable(checkpoint, selector)
    report_unused(config, grid.selectors, reporter)
    cuts_values = bool(config.grid.value_dims) or checkpoint.family.one_width
    needs, tokenizer = grid.needs(has_text, cuts_values), load_tokenizer(checkpoint.folder)
    text, max_tokens = calibration.reading(config.text), config.measures.max_tokens
    text_windows = evaluation_windows(tokenizer, text, config.text_length, max_tokens, option="text_length")
    wikitext = read_wikitext(
        config.text, tokenizer, reporter, max_tokens=max_tokens, max_length=config.measures.max_length
    )
    windows = calibration_windows(calibration, tokenizer, first.axis.width, reporter) if has_text else None
    if windows is not None and is_same_text(config.text, calibration.data):
        reporter.say("the evaluation text is also the calibration text, which cuts fit better than other text")
    settings = _settings(config, tokenizer, text_windows, wikitext, windows)
    with reporter.waiting("reading the weights for their fingerprint"):
        name = None if score is None else getattr(score, "__name__", "score")
        settings = replace(settings, fingerprint=checkpoint.fingerprint, function=name)
    study = SweepStudy(
        checkpoint=checkpoint, candidates=tuple(grid.candidates()), windows=text_windows, options=config.measures,
        text=text, score=score,
        size=TextSize.of(tokenizer, text_windows.tokens), wikitext=wikitext, settings=settings, reporter=reporter,
    )  # fmt: skip
    earlier, count = read_earlier(folder / SWEEP, study.settings), len(study.candidates)
    missing = len(study.missing(earlier))
    if earlier is not None:
        reporter.say(f"{count - missing} of {plural(count, 'row')} found in {folder / SWEEP} already")
        if not missing:
            return study.record(earlier.uncut, earlier.rows, earlier.kernels)
    with reporter.waiting("loading the model"):
        runtime = load(checkpoint.folder, device=config.run.device, dtype=config.run.dtype)
    reporter.detail(f"kernels: {runtime.kernels}")
    run = LoadOptions(**vars(config.run))
    collector = EvidenceCollector(
        calibration=calibration, windows=windows, run=run, runtime=runtime, partial=folder / "evidence.partial"
    )
    with reporter.then("the measurement", _tokens(checkpoint, text_windows, settings, missing + (earlier is None))):
        evidence, _ = collector.collect(checkpoint, needs, reporter)
    open_cut = partial(_open_cut, source, checkpoint, folder, config, runtime, evidence, reporter)

    def measure() -> SweepRecord:
        has_scores = bool(settings.recall or settings.function or settings.tasks)
        columns, done = (*COLUMNS, *["scores"] * has_scores), itertools.count(1)
        with reporter.table(columns) as table, reporter.meter("models", count + 1) as update:
            update(0 if earlier is None else count - missing + 1, "")

            def show(row: Row) -> None:
                table(_cells(row))
                update(max(next(done), count - missing) + 1, "")

            return study.measure(runtime, open_cut, earlier, folder / SWEEP, show)

    return distributed.from_main(measure)


def _settings(
    config: SweepConfig, tokenizer: Any, measured: Windows, wikitext: WikiText | None, calibration: Windows | None
) -> SweepSettings:
    """Return the settings that affect the numbers of a sweep, without the fingerprint."""
    text, device, reconstruction, options = config.calibration, config.run.place.type, None, config.measures
    if config.reconstruct is not None:
        with prefixed("reconstruct_", ReconstructOptions):
            training = config.reconstruct.windows(tokenizer, text.reading(text.data), text.seed, device)
        reconstruction = config.reconstruct.settings(device, training)
    recall = SEQUENCES * (measured.tokens.numel() >= recall_tokens()) if config.recall is None else config.recall
    return SweepSettings(
        calibration=None if calibration is None else Text(**calibration.describe()), text=Text(**measured.describe()),
        wikitext=None if wikitext is None else wikitext.digest,
        f=config.cut.rrqr_f, swaps=config.cut.rrqr_swaps, rows=text.rrqr_rows, seed=text.seed, device=device,
        dtype=config.run.precision_name, keep_norm_eps=config.cut.keep_norm_eps, keep_heads=config.cut.keep_heads,
        reconstruct=reconstruction, limit=options.limit, max_length=options.max_length, state_every=options.state_every,
        recall=recall, recall_prompts=None if options.recall_prompts == "full" else options.recall_prompts,
        value_method=config.grid.value_method, tasks={source.task: source.data for source in find_sources(options)},
    )  # fmt: skip


def _tokens(checkpoint: Checkpoint, windows: Windows, settings: SweepSettings, rows: int) -> float:
    """Return the cost of some rows, in tokens once forward through the model."""
    recall = recall_tokens(settings.recall) if settings.recall else 0
    trained = 0 if settings.reconstruct is None else reconstruction_tokens(checkpoint, settings.reconstruct)
    return rows * (windows.tokens.numel() + recall + trained)


@contextmanager
def _open_cut(
    source: str | PathLike[str], checkpoint: Checkpoint, folder: Path, config: SweepConfig, runtime: Runtime,
    evidence: EvidenceFile | None, reporter: Reporter, candidate: Candidate,
) -> Iterator[CandidateModel]:  # fmt: skip
    """Yield the uncut model under the masks of a candidate, or its reconstructed cut, which is then removed."""
    assert candidate.selector is not None
    cut, mixers = cut_config(candidate.selector, candidate, folder, config), checkpoint.mixers
    job = selection_job(checkpoint, cut, SILENT)
    plan = job.choose(evidence)
    choices = plan.selections.values()
    kappas = [kappa for choice in choices for kappa in choice.certificate.get("condition_after", ())]
    if cut.reconstruct is None:
        with masked(runtime.model, mixers, plan.selections, rescaled=not job.corrected):
            yield CandidateModel(runtime=runtime, mixers=mixers, condition_numbers=kappas)
        return
    out = folder / CANDIDATES / f"{plan.method}-{plan.score}-{dims_text(plan.key_dim, plan.value_dim).replace(' ', '')}"
    cut = replace(cut, force=True)  # replace a cut with other settings, which an interrupted sweep left
    if not _is_same_cut(out, cut, source, checkpoint):
        prune(source, out, cut, progress=reporter)
    runtime = load(out, device=cut.run.device, dtype=cut.run.dtype)
    yield CandidateModel(runtime=runtime, mixers=Checkpoint.open(out).mixers, condition_numbers=kappas)
    shutil.rmtree(out)
    with suppress(OSError):  # another candidate is still there
        out.parent.rmdir()


def _is_same_cut(out: Path, cut: PruneConfig, source: str | PathLike[str], checkpoint: Checkpoint) -> bool:
    """Return whether an interrupted sweep left this cut of this model there."""
    if not (out / ReconstructionRecord.FILE).is_file():
        return False
    record = ReconstructionRecord.read(out / ReconstructionRecord.FILE)
    config = run_config("prune", {"model": source, "out": out}, cut.to_values())
    return record.config == config and record.teacher.fingerprint == checkpoint.fingerprint


def _cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table that shows progress."""
    scores = [f"{item.name} {item.value:.4g}" for item in row.measures(main=True) if item.value is not None]
    loss, extra = signed(row.nats_over_uncut, row.nats_error), [", ".join(scores)] * bool(scores)
    return row.method, row.score, row.dims, row.state_dtype, perplexity(row.perplexity), loss, *extra
