"""`slimstate eval`: measure a model by perplexity, tasks and recall, alone or beside a baseline."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimstate.core.state_dtype import StateRounding
from slimstate.data.options import TextSource
from slimstate.data.rows import as_text_source
from slimstate.evaluation.compare import open_models, same_tokenizers, shared_windows
from slimstate.evaluation.measure import Measurement, compare
from slimstate.evaluation.task_sources import find_sources
from slimstate.evaluation.wikitext import read_wikitext
from slimstate.records.base import versions
from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.folder import check_record
from slimstate.records.provenance import run_config
from slimstate.system.atomic import check_place
from slimstate.system.errors import PlanError
from slimstate.workflows.inputs import Inputs, Model, Progress
from slimstate.workflows.options import EvalConfig


def evaluate(
    model: Model, text: TextSource | None = None, config: EvalConfig | None = None, *,
    out: str | Path | None = None, tokenizer: Any = None, progress: Progress = True, **options: Any,
) -> EvaluationRecord:  # fmt: skip
    """Measure a model: perplexity of a text per token, of WikiText also per word, tasks of lm-eval, recall.

    Windows of the text do not overlap. Word perplexity is that of lm-eval's task `wikitext`.

    Parameters:
        model: A model folder or a hub id. In Python also a transformers model in memory.
        text: Text to predict: a .txt, .jsonl or .parquet file (also .gz or .xz), a folder of them, or a datasets name.
            In Python also strings, chats or rows in a list or any iterable.
        out: File for the record, such as records/evaluation.json.

    Returns:
        A record: `perplexity` (per token), `word_perplexity`, `bits_per_byte`, `lm_eval`, `compared`, ...

    Examples:
        >>> slimstate.evaluate("slim", "demo/evaluation.txt", baseline="demo/model").perplexity
    """
    started, config = time.perf_counter(), EvalConfig.merge(config, options)
    measures = replace(config.measures, tasks=(*config.measures.tasks, *["recall"] * config.recall))
    if text is None and config.associative:
        raise PlanError("`associative` places its pairs in a text: give `text`")
    if text is None and not measures.tasks:
        raise PlanError("nothing to measure: give `text`, `tasks` or `recall`")
    config.refuse(("length", "max_tokens", "documents", "special_tokens"), "needs `text`", unless=text is not None)
    if out is not None:
        check_place(Path(out), folder=False)
        check_record(Path(out))
    roundings = (StateRounding(dtype=config.state_dtype, every=measures.state_every), StateRounding())
    source = None if text is None else as_text_source(text)
    with Inputs(progress, tokenizer, model, config.baseline) as inputs:
        models = [inputs.model(each) for each in (model, config.baseline) if each is not None]
        checkpoints = open_models(models)
        tokenizers = same_tokenizers(checkpoints.values())
        find_sources(measures)  # refuses missing data before a model is loaded
        reading = windows = wikitext = None
        if source is not None:
            reading = config.reading(source)
            windows = shared_windows(tokenizers, reading, config.length, measures.max_tokens)
            wikitext = read_wikitext(
                source, next(iter(tokenizers.values())), inputs.reporter,
                max_tokens=measures.max_tokens, max_length=measures.max_length,
            )  # fmt: skip
        measurement = Measurement(
            text=reading, windows=windows, wikitext=wikitext, associative=config.associative, options=measures,
            seed=config.seed, run=config.run, reporter=inputs.reporter,
        )  # fmt: skip
        pairs = zip(checkpoints.items(), roundings, strict=False)
        results = [measurement.measure(checkpoint, name, rounding) for (name, checkpoint), rounding in pairs]
    values = replace(config, baseline=models[1] if len(models) > 1 else None).to_values()
    record = EvaluationRecord(
        **vars(results[0]), baseline=results[1] if len(results) > 1 else None,
        compared=compare(*results) if len(results) > 1 else (), seed=config.seed, versions=versions(),
        config=run_config("eval", {"model": models[0], "text": source, "out": out}, values),
        seconds=time.perf_counter() - started,
    )  # fmt: skip
    if out is not None:
        record.write(Path(out))
    return replace(record, out=None if out is None else str(out))
