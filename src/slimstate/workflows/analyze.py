"""`slimstate analyze`: follow the states of models through a text, write records, and draw figures of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from slimstate.data.options import TextOptions, TextSource
from slimstate.evaluation.options import check_times
from slimstate.models.options import RunOptions
from slimstate.system.errors import DataError, PlanError
from slimstate.workflows.inputs import Inputs, Model, Progress, in_memory

if TYPE_CHECKING:
    from slimstate.checkpoints.reader import Checkpoint
    from slimstate.data.text import Windows
    from slimstate.evaluation.analysis import Analysis
    from slimstate.records.states import TraceRecord
    from slimstate.system.progress import Reporter

FIGURES = ("utilisation*", "spectra.*", "spectrum.*", "retrieval-error.*", "filters-*")
BOUND_TIMES = 4  # times at which the bounds are tested


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig(TextOptions):
    """How to follow the states of models"""

    length: Annotated[int, Meta(ge=2)] = 1024
    """Tokens to follow the states through."""
    samples: Annotated[int, Meta(ge=1)] = 1
    """Texts of that length to average over."""
    every: Annotated[int, Meta(ge=1)] = 16
    """Tokens between two looks at the states."""
    skip: Annotated[int, Meta(ge=0)] = 128
    """First tokens that spectra and maps leave out."""
    head: str | None = None
    """LAYER:HEAD whose spectra are drawn; default: a typical one."""
    run: RunOptions = RunOptions()

    def check(self) -> None:
        check_times(self.length, self.every, self.skip)


def analyze(
    models: Model | Sequence[Model], text: TextSource, out: str | Path, config: AnalyzeConfig | None = None, *,
    tokenizer: Any = None, progress: Progress = True, **options: Any,
) -> Analysis:  # fmt: skip
    """Show how much of their states models use: rank utilisation, spectra, filters, the bounds of the theory.

    Parameters:
        models: Model folders or hub ids. In Python one or several, also transformers models in memory.
        text: Text to read: a .txt, .jsonl or .parquet file (also .gz or .xz), a folder of them, or a datasets name. In
            Python also strings, chats or rows in a list or any iterable.
        out: Folder for records and figures.
        config: An `AnalyzeConfig`; its options can also be given by name.
        tokenizer: The tokenizer of models in memory.
        progress: Whether to show progress, or a `Reporter` of your own.
        options: Options of the config by name, which override it.

    Returns:
        `models`, each with its `utilisation` and `effective_rank`, `figures`, and the folder, `path`.

    Examples:
        >>> analysis = slimstate.analyze(["demo/model", "slim"], "demo/evaluation.txt", "records")
        >>> [model.utilisation for model in analysis.models]
    """
    config = AnalyzeConfig.merge(config, options)
    several = [models] if isinstance(models, (str, PathLike)) or in_memory(models) else list(models)
    if not several:
        raise PlanError("give at least one model")
    with Inputs(progress, tokenizer, *several) as inputs:
        return _analyze([inputs.model(model) for model in several], text, Path(out), config, inputs.reporter)


def _analyze(
    sources: Sequence[str | PathLike[str]], text: TextSource, folder: Path, config: AnalyzeConfig, reporter: Reporter
) -> Analysis:
    """Measure all models, then write the records and draw them."""
    from slimstate.checkpoints.identity import identity
    from slimstate.checkpoints.reader import Checkpoint
    from slimstate.data.rows import as_text_source
    from slimstate.evaluation.analysis import Analysis, StateUse, filters_record
    from slimstate.evaluation.compare import distinct_names
    from slimstate.records.base import versions
    from slimstate.records.parts import Text
    from slimstate.records.provenance import run_config
    from slimstate.report.plots import draw_analysis, find_head
    from slimstate.system.atomic import check_place, staged_files

    started = time.perf_counter()
    check_place(folder, folder=True)
    checkpoints = [Checkpoint.open(source) for source in sources]
    names = distinct_names([checkpoint.source for checkpoint in checkpoints])
    if config.head is not None:
        mixers = checkpoints[0].mixers
        find_head([mixer.layer for mixer in mixers], mixers[0].value_heads, config.head)
    _check_files(folder, names)
    text = as_text_source(text)
    windows = _read_windows(checkpoints, text, config)
    shared = {
        "text": Text(**windows.describe()), "every": config.every, "skip": config.skip, "seed": config.seed,
        "versions": versions(),
        "config": run_config("analyze", {"models": sources, "text": text, "out": folder}, config.to_values()),
    }  # fmt: skip
    traces, filters, plans = [], [], {}
    for name, checkpoint in zip(names, checkpoints, strict=True):
        about = {**vars(identity(checkpoint, name)), **shared}
        traces.append(_trace(checkpoint, windows, about, config, reporter))
        if checkpoint.plan is not None:
            plans[name] = replace(checkpoint.plan, folder=checkpoint.source)
        if checkpoint.mixers[0].filters:
            filters.append(filters_record(checkpoint, {**about, "kernels": traces[-1].kernels}))
    records = [*((trace.name, trace) for trace in traces), *((each.name, each) for each in filters), *plans.items()]
    with staged_files(folder) as place:
        for name, record in records:
            record.write(place / f"{record.KIND}-{name}.json")
        figures = draw_analysis(traces, filters, place, config.head)
    return Analysis(
        out=str(folder),
        models=tuple(map(StateUse.of, traces)),
        figures=tuple(str(folder / path.name) for path in figures),
        seconds=time.perf_counter() - started,
    )


def _check_files(folder: Path, names: Sequence[str]) -> None:
    """Refuse a folder that has files of others by the names that ours will have."""
    from slimstate.records.folder import check_drawn, check_record
    from slimstate.system.atomic import check_kind

    for kind in ("trace", "filters", "plan"):
        for name in names:
            check_kind(folder / f"{kind}-{name}.json", folder=False)
            check_record(folder / f"{kind}-{name}.json")
    check_drawn(folder, FIGURES, beside="trace-*.json")


def _read_windows(checkpoints: Sequence[Checkpoint], text: Any, config: AnalyzeConfig) -> Windows:
    from slimstate.data.documents import Reading
    from slimstate.evaluation.compare import same_tokenizers, shared_windows

    reading, max_tokens = Reading(text, config.documents), config.samples * config.length
    windows = shared_windows(same_tokenizers(checkpoints), reading, config.length, max_tokens)
    if len(windows.tokens) < config.samples:
        count = f"{len(windows.tokens)} windows of {config.length} tokens"
        raise DataError(f"{text} has {count}: use fewer `samples` than {config.samples}")
    return windows


def _trace(
    checkpoint: Checkpoint, windows: Windows, about: Mapping[str, Any], config: AnalyzeConfig, reporter: Reporter
) -> TraceRecord:
    """Load one model, follow its states, and let the model go."""
    from slimstate.evaluation.analysis import trace_record
    from slimstate.evaluation.state_traces import trace_states
    from slimstate.models.load import load

    with reporter.waiting(f"loading {about['name']}"):
        runtime = load(checkpoint.folder, device=config.run.device, dtype=config.run.dtype)
    reporter.say(f"{about['name']}: kernels: {runtime.kernels}")
    trace = trace_states(
        runtime, checkpoint.mixers, windows.tokens, every=config.every, skip=config.skip, readings=BOUND_TIMES,
        seed=config.seed, reporter=reporter,
    )  # fmt: skip
    return trace_record(trace, {**about, "kernels": runtime.kernels})
