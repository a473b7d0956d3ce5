"""`slimstate eval`: measure a model by perplexity, tasks and recall, alone or beside a baseline."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from slimstate.checkpoints.model_card import with_evaluation
from slimstate.checkpoints.writer import CARD
from slimstate.core.state_dtype import StateRounding
from slimstate.data.options import TextSource
from slimstate.data.rows import as_text_source
from slimstate.data.sources import is_same_text
from slimstate.evaluation.associative_recall import recall_tokens
from slimstate.evaluation.compare import open_models, same_tokenizers, shared_windows
from slimstate.evaluation.measure import Measurement, compare
from slimstate.evaluation.perplexity import evaluation_windows
from slimstate.evaluation.task_sources import find_sources
from slimstate.evaluation.wikitext import read_wikitext
from slimstate.models.load import check_runnable
from slimstate.records.base import versions
from slimstate.records.cut import CutRecord
from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.folder import check_record
from slimstate.records.provenance import command_line, run_config
from slimstate.records.training import ReconstructionRecord
from slimstate.system import distributed
from slimstate.system.atomic import write_text
from slimstate.system.errors import PlanError
from slimstate.system.interruption import STOP
from slimstate.system.options import as_path
from slimstate.workflows.inputs import Inputs, Model, Progress
from slimstate.workflows.options import EvalConfig, PruneConfig, ReconstructConfig

R = TypeVar("R", CutRecord, ReconstructionRecord)


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
        out = as_path(out)
        check_record(out)
    rounding = StateRounding(dtype=config.state_dtype, every=measures.state_every)
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
            limits = {"max_tokens": measures.max_tokens, "max_length": measures.max_length}
            wikitext = read_wikitext(source, next(iter(tokenizers.values())), inputs.reporter, **limits)
        config.refuse(("max_length",), "needs `tasks`, `recall` or WikiText", unless=bool(wikitext or measures.tasks))
        measurement = Measurement(
            text=reading, windows=windows, wikitext=wikitext, associative=config.associative, options=measures,
            seed=config.seed, run=config.run, reporter=inputs.reporter,
        )  # fmt: skip
        results = measurement.measure_all(checkpoints, rounding)
    values = replace(config, baseline=models[1] if len(models) > 1 else None).to_values()
    baseline, compared = (results[1], compare(*results)) if len(results) > 1 else (None, ())
    record = EvaluationRecord(
        **vars(results[0]), baseline=baseline, compared=compared, seed=config.seed, versions=versions(),
        config=run_config("eval", {"model": models[0], "text": source, "out": out}, values),
        seconds=time.perf_counter() - started,
    )  # fmt: skip
    if out is not None:
        record.write(out)
    return replace(record, out=None if out is None else str(out))


def evaluated(work: Callable[[], R], uncut: Model, config: PruneConfig | ReconstructConfig, inputs: Inputs) -> R:
    """Return the record of some work; with `eval_text`, measure what it wrote beside the uncut model, for its card.

    The text is also read before the work, so that one of no use is refused at once.
    """
    text, source = config.calibration if isinstance(config, PruneConfig) else config, config.evaluation.eval_text
    if source is None:
        return work()
    (checkpoint,), limit = open_models([uncut]).values(), config.evaluation.eval_tokens
    check_runnable(checkpoint, "leave out `eval_text`")
    (tokenizer,) = same_tokenizers([checkpoint]).values()
    windows = evaluation_windows(tokenizer, text.reading(source), EvalConfig.length, limit, option="eval_tokens")
    if text.data is not None and is_same_text(source, text.data):
        inputs.reporter.say("the evaluation text is also that of `data`, which the result fits better than other text")
    with inputs.reporter.then("the measurement", 2 * (windows.tokens.numel() + recall_tokens(max_tokens=limit))):
        record = work()
    out = Path(str(record.out))
    place = out / EvaluationRecord.FILE
    measures = {
        "baseline": uncut, "associative": True, "documents": text.documents, "special_tokens": text.special_tokens,
        "seed": text.seed, "max_tokens": limit,
    }  # fmt: skip

    def measure() -> EvaluationRecord:
        evaluation = evaluate(out, source, out=place, progress=inputs.reporter, run=config.run, **measures)
        write_text(out / CARD, with_evaluation((out / CARD).read_text(encoding="utf-8"), evaluation))
        return evaluation

    def command() -> str:
        values = EvalConfig.merge(None, {**measures, "run": config.run}).to_values()
        line = command_line(run_config("eval", {"model": out, "text": source, "out": place}, values))
        return f"{out}: written, and complete, but not measured; to measure it: {line}"

    with STOP.with_message(command):
        return replace(record, evaluation=distributed.from_main(measure))
