"""Measure a model: perplexity on a text, lm-eval's tasks, recall; alone or beside a baseline. One record per run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from slimstate.checkpoints.identity import identity
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.state_dtype import StateRounding
from slimstate.data.documents import Reading, check_documents
from slimstate.data.rows import Texts, as_text_source
from slimstate.data.text import Windows
from slimstate.evaluation.associative_recall import associative_recall
from slimstate.evaluation.compare import distinct_names, same_tokenizers, shared_windows
from slimstate.evaluation.lm_eval import run_tasks
from slimstate.evaluation.perplexity import TextSize, mean_nats, perplexity_of
from slimstate.evaluation.task_sources import TaskOptions, resolve, sources
from slimstate.models.load import Runtime, load
from slimstate.models.options import RunOptions
from slimstate.models.state_rounding import rounded_states
from slimstate.pruning.budget import stored_bytes
from slimstate.records.base import versions
from slimstate.records.evaluation import EvaluationRecord, MeasurePair, Result
from slimstate.records.ownership import check_record
from slimstate.records.provenance import run_config
from slimstate.system.atomic import check_place
from slimstate.system.errors import PlanError
from slimstate.system.progress import SILENT, Reporter


@dataclass(frozen=True, kw_only=True)
class EvalOptions(TaskOptions):
    """How much is measured.

    Parameters:
        length: tokens in a window of the text.
        max_tokens: of its beginning; by default all.
        documents: how those of the text are told apart, by default as it suggests: lines, blank, file or rows.
        seed: for what is drawn at random.
        task_data: a folder of files that take the place of hub datasets.
        limit: documents of each task; by default all.
        max_length: tokens that tasks show a model at once; by default what its config names.
        state_dtype: what states of the model are stored in, not those of a baseline.
        state_every: tokens after which they are: 1 as engines decode, more as they prefill.

    Examples:
        >>> slimstate.evaluate("slim", "text.txt", options=slimstate.EvalOptions(max_tokens=100_000))
    """

    length: int = 1024
    max_tokens: int | None = None
    documents: str | None = None
    seed: int = 0
    state_dtype: str = "float32"
    state_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_documents(self.documents)
        StateRounding(dtype=self.state_dtype, every=self.state_every)

    @property
    def rounding(self) -> StateRounding:
        return StateRounding(dtype=self.state_dtype, every=self.state_every)


@dataclass(frozen=True, kw_only=True)
class Programme:
    """What to measure of a model."""

    text: Reading | None
    windows: Windows | None
    tasks: tuple[str, ...]
    associative: bool
    options: EvalOptions


def evaluate(
    model: str | PathLike[str],
    text: str | Path | Iterable[object] | None = None,
    *,
    tasks: str | None = None,
    recall: bool = False,
    associative: bool = False,
    baseline: str | PathLike[str] | None = None,
    options: EvalOptions | None = None,
    run: RunOptions | None = None,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> EvaluationRecord:
    """Perplexity of `text` per token and per word, with nats and bits per byte; tasks; recall. `out` gets the record.

    `tasks` are names of lm-eval with commas between them, `recall` the six recall tasks; `associative` asks for random
    pairs hidden in `text`. `baseline` is a second model to put beside this one.
    """
    started = time.perf_counter()
    options, run = options or EvalOptions(), run or RunOptions()
    if associative and text is None:
        raise PlanError("`associative` hides its names in a text: give `text` too")
    if text is None and not tasks and not recall:
        raise PlanError("nothing to measure: give `text`, `tasks` or `recall`")
    if out is not None:
        check_place(Path(out), folder=False)
        check_record(Path(out))
    checkpoints = [Checkpoint.open(source) for source in (model, baseline) if source is not None]
    names = distinct_names([checkpoint.source for checkpoint in checkpoints])
    wanted = ",".join(filter(None, (tasks, "recall" if recall else None)))
    read = None if text is None else as_text_source(text)
    programme = _programme(checkpoints, read, wanted, associative, options)
    roundings = (options.rounding, StateRounding())  # a baseline is as exact as it can be
    results = [
        measure(checkpoint, name, programme, run, reporter, rounding)
        for checkpoint, name, rounding in zip(checkpoints, names, roundings, strict=False)
    ]
    asked = {
        "text": read, "length": options.length if read else None, "max_tokens": options.max_tokens,
        "documents": options.documents, "tasks": tasks,
        "recall": recall, "associative": associative, "task_data": options.task_data, "limit": options.limit,
        "max_length": options.max_length, "baseline": baseline, "seed": options.seed,
        **options.rounding.asked, **vars(run), "out": out,
    }  # fmt: skip
    record = EvaluationRecord(
        **vars(results[0]),
        baseline=None if baseline is None else results[1],
        compared=() if baseline is None else compare(*results),
        seed=options.seed,
        versions=versions(),
        config=run_config("eval", {"model": model}, asked),
        seconds=time.perf_counter() - started,
    )
    if out is None:
        return record
    record.write(Path(out))
    return replace(record, out=str(out))


def _programme(
    checkpoints: Sequence[Checkpoint], text: str | Texts | None, tasks: str, associative: bool, options: EvalOptions
) -> Programme:
    """What cannot be had is said here, before a model is loaded."""
    tokenizers = same_tokenizers(checkpoints)
    wanted = resolve(tasks) if tasks else ()
    if wanted:
        sources(wanted, options.task_folder)
    reading, windows = None, None
    if text is not None:
        reading = Reading(text, options.documents)
        windows = shared_windows(tokenizers, reading, options.length, options.max_tokens)
    return Programme(text=reading, windows=windows, tasks=wanted, associative=associative, options=options)


def measure(
    checkpoint: Checkpoint,
    name: str,
    programme: Programme,
    run: RunOptions,
    reporter: Reporter,
    rounding: StateRounding,
) -> Result:
    """All the measures of one model."""
    with reporter.waiting("loading the model"):
        runtime = load(checkpoint.folder, device=run.device, dtype=run.dtype)
    reporter.say(f"kernels: {runtime.kernels}")
    mixers = checkpoint.mixers
    found = Result(
        **vars(identity(checkpoint, name)),
        kernels=runtime.kernels,
        state_dtype=rounding.dtype,
        state_every=None if rounding.is_exact else rounding.every,
        state_bytes=stored_bytes(mixers, mixers[0].axis.width, rounding),
    )
    with rounded_states(runtime.model, mixers, rounding):
        return _measured(found, runtime, programme, reporter)


def _measured(found: Result, runtime: Runtime, programme: Programme, reporter: Reporter) -> Result:
    options = programme.options
    if programme.windows is not None:
        found = _with_perplexity(found, runtime, programme.windows, reporter)
    if programme.text is not None and programme.associative:
        recalled = associative_recall(
            runtime, programme.text, seed=options.seed, max_tokens=options.max_tokens, reporter=reporter
        )
        found = replace(found, associative_recall=recalled)
    if programme.tasks:
        scores = run_tasks(
            runtime,
            programme.tasks,
            data=options.task_folder,
            limit=options.limit,
            seed=options.seed,
            max_length=options.max_length,
            reporter=reporter,
        )
        found = replace(found, lm_eval=scores)
    return found


def _with_perplexity(result: Result, runtime: Runtime, windows: Windows, reporter: Reporter) -> Result:
    tokens = windows.tokens
    nats = mean_nats(runtime, tokens, reporter)
    size = TextSize.of(runtime.tokenizer, tokens)
    return replace(
        result,
        text=windows.source,
        digest=windows.digest,
        documents=windows.documents,
        length=tokens.shape[1],
        windows=len(tokens),
        perplexity=perplexity_of(nats),
        nats_per_token=nats,
        nats_per_byte=size.nats_per_byte(nats),
        **vars(size.predicted(nats)),
    )


def scores_of(result: Result) -> dict[str, tuple[float, bool]]:
    """Every number of a result that can be compared, and whether more of it is better."""
    return {
        found.name: (found.value, found.more_is_better)
        for found in result.measures()
        if found.value is not None and found.more_is_better is not None
    }


def compare(result: Result, baseline: Result) -> tuple[MeasurePair, ...]:
    """Both side by side. The share is what the model has of the baseline's score: 1 is all of it."""
    theirs = scores_of(baseline)
    rows = []
    for name, (value, more_is_better) in scores_of(result).items():
        reference = theirs[name][0]
        above, below = (value, reference) if more_is_better else (reference, value)
        share = above / below if below else None
        rows.append(MeasurePair(measure=name, model=value, baseline=reference, share=share))
    return tuple(rows)
