"""`slimstate analyze`: follow the states of models through a text, write records, and draw figures of them."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from slimstate.data.options import TextSource
from slimstate.data.rows import as_text_source
from slimstate.evaluation.analysis import Analysis, StateUse, filters_record, trace_model
from slimstate.evaluation.compare import open_models, same_tokenizers, shared_windows
from slimstate.records.base import versions
from slimstate.records.folder import check_drawings, check_record
from slimstate.records.numbers import plural
from slimstate.records.parts import Text
from slimstate.records.provenance import run_config
from slimstate.system.atomic import check_place, staged_files
from slimstate.system.errors import DataError, PlanError
from slimstate.system.options import as_path
from slimstate.system.progress import Reporter
from slimstate.workflows.inputs import Inputs, Model, Progress, in_memory
from slimstate.workflows.options import AnalyzeConfig

FIGURES = ("utilisation*", "spectra.*", "spectrum.*", "retrieval-error.*", "filters-*")


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

    Returns:
        `models`, each with its `utilisation` and `effective_rank`, `figures`, and the folder, `path`.

    Examples:
        >>> analysis = slimstate.analyze(["demo/model", "slim"], "demo/evaluation.txt", "records")
        >>> [model.utilisation for model in analysis.models]
    """
    config = AnalyzeConfig.merge(config, options)
    one = isinstance(models, (str, PathLike)) or in_memory(models) or not isinstance(models, Iterable)
    several = [models] if one else list(models)
    if not several:
        raise PlanError("give at least one model")
    with Inputs(progress, tokenizer, *several) as inputs:
        return _analyze([inputs.model(model) for model in several], text, as_path(out), config, inputs.reporter)


def _analyze(
    sources: Sequence[str | PathLike[str]], text: TextSource, folder: Path, config: AnalyzeConfig, reporter: Reporter
) -> Analysis:
    """Measure all models, then write the records and draw them."""
    from slimstate.reports.plots.states import draw_analysis, find_head

    started = time.perf_counter()
    check_place(folder, folder=True)
    checkpoints = open_models(sources)
    if config.head is not None:
        mixers = next(iter(checkpoints.values())).mixers
        find_head([mixer.layer for mixer in mixers], mixers[0].value_heads, config.head)
    for path in (folder / f"{kind}-{name}.json" for kind in ("trace", "filters", "plan") for name in checkpoints):
        check_record(path, config.force)
    check_drawings(folder, FIGURES, beside="trace-*.json")
    text, tokenizers = as_text_source(text), same_tokenizers(checkpoints.values())
    windows = shared_windows(tokenizers, config.reading(text), config.length, config.samples * config.length)
    if len(windows.tokens) < config.samples:
        count = f"{plural(len(windows.tokens), 'window')} of {config.length} tokens"
        raise DataError(f"{text} has {count}: use fewer `samples` than {config.samples}")
    shared = {
        "text": Text(**windows.describe()), "every": config.every, "skip": config.skip, "seed": config.seed,
        "versions": versions(),
        "config": run_config("analyze", {"models": sources, "text": text, "out": folder}, config.to_values()),
    }  # fmt: skip
    traces, filters, plans = [], [], {}
    models = checkpoints.items()
    for name, checkpoint in reporter.track(models, "models", len(models)) if len(models) > 1 else models:
        about = {**vars(checkpoint.identity(name)), **shared}
        traces.append(trace_model(checkpoint, windows.tokens, about, config, config.run, reporter))
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
        models=tuple(StateUse.of(trace, traces[0]) for trace in traces),
        figures=tuple(str(folder / path.name) for path in figures),
        seconds=time.perf_counter() - started,
    )
