"""Run tasks of lm-eval on a model that is already loaded: the paper's seven, six recall tasks, or any other by name.

lm-eval defines prompts, requests and metrics. Added here: local files can replace hub datasets, recall prompts are
truncated to 2K tokens with the model's tokenizer, and the result is a record.
"""

import copy
import io
import logging
import math
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib.metadata import version
from itertools import count, islice
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch

from slimstate.core.standard_errors import share_error
from slimstate.evaluation import task_sources
from slimstate.evaluation.options import TaskOptions
from slimstate.evaluation.task_sources import RECALL, Source, lm_eval_module
from slimstate.models.load import Runtime
from slimstate.records.evaluation import LmEval, TaskScores
from slimstate.records.numbers import plural
from slimstate.system.errors import DataError, ModelError, reason_of
from slimstate.system.json_files import plain
from slimstate.system.progress import SILENT, Reporter

AVERAGES = {
    "zero_shot": {
        "lambada_openai": "acc", "arc_easy": "acc_norm", "arc_challenge": "acc_norm", "hellaswag": "acc_norm",
        "winogrande": "acc", "piqa": "acc_norm",
    },
    "recall": dict.fromkeys(RECALL, "contains"),
}  # fmt: skip
BATCH = {"cpu": 1, "cuda": 8}


def run_tasks(runtime: Runtime, options: TaskOptions, *, seed: int = 0, reporter: Reporter = SILENT) -> LmEval:
    """Return the metrics of every task and their averages.

    A folder of local files has TASK.jsonl or TASK.parquet, or a folder TASK with a file for each split. `max_length`
    does not apply to recall prompts, which have their own length.
    """
    names = task_sources.resolve_tasks(options.tasks, options.include_path)
    reporter.say(f"lm-eval {version('lm_eval')}: {', '.join(names)}")
    limit, max_length = options.limit, options.max_length
    with reporter.waiting(f"running {plural(len(names), 'task')}"), silence(), TemporaryDirectory() as folder:
        manager = task_sources.task_manager(names, task_sources.task_files(options.include_path, *options.tasks))
        sources = task_sources.find_sources(options, manager)
        tasks = {
            source.task: _load(manager, source, Path(folder), runtime.tokenizer, options.recall_prompts)
            for source in sources
        }
        for source in sources:
            _try_documents(tasks[source.task], source, limit)
        recall = {name: task for name, task in tasks.items() if name in RECALL}
        others = {name: task for name, task in tasks.items() if name not in RECALL}
        scores = _evaluate(runtime, others, limit, seed, max_length)
        lengths = [task.prompt_tokens + task.config.generation_kwargs["max_gen_toks"] for task in recall.values()]
        add_bos = False if options.recall_prompts == "harness" else None
        scores |= _evaluate(runtime, recall, limit, seed, max(lengths, default=None), add_bos)  # truncates longer ones
    scores = {source.task: replace(scores[source.task], data=source.data) for source in sources}
    means, errors = averages(scores)
    return LmEval(
        tasks=scores, averages=means, stderr=errors, seed=seed, limit=limit, max_length=max_length,
        lm_eval=version("lm_eval"),
    )  # fmt: skip


def averages(tasks: Mapping[str, TaskScores]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the paper's two means, each only where all its tasks have a number, and their standard errors."""
    means, errors = dict[str, float](), dict[str, float]()
    for label, members in AVERAGES.items():
        values = [tasks[name].metrics[metric] for name, metric in members.items() if name in tasks]
        numbers = [value for value in values if value is not None]
        if len(numbers) == len(members):
            means[label] = sum(numbers) / len(numbers)
            parts = [tasks[name].stderr.get(metric) or 0.0 for name, metric in members.items()]
            errors |= {label: math.hypot(*parts) / len(parts)} if all(parts) else {}
    return means, errors


def _load(manager: Any, source: Source, folder: Path, tokenizer: Any, prompts: str) -> Any:
    """Return lm-eval's task with its documents; lm-eval lets the config of a task be changed within a group."""
    member = {"task": source.task, **source.overrides(folder)}
    if source.task in RECALL:
        metadata = manager.task_index[source.task].cfg["metadata"]
        member["metadata"] = {**metadata, "tokenizer": tokenizer, "prompts": prompts}
    try:
        task = manager.load([{"group": "slimstate", "task": [member]}])["tasks"][source.task]
    except Exception as error:
        if source.files:
            raise DataError(f"task {source.task} cannot use {source.place}: {_reason(error)}") from error
        raise DataError(
            f"task {source.task}: its dataset {source.place} cannot be loaded ({_reason(error)}); "
            "give a folder of files with `task_data`"
        ) from error
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise DataError(f"task {source.task} runs code or shows images, which slimstate does not support")
    return task


def _try_documents(task: Any, source: Source, limit: int | None) -> None:
    """Raise a `DataError` if a local document lacks a field, before the model runs."""
    rows = task.rows if source.task in RECALL else count()
    for row, document in zip(rows, islice(task.eval_docs, limit) if source.files else (), strict=False):
        try:
            task.doc_to_text(document)
            task.doc_to_target(document)
            if task.get_config("doc_to_choice") is not None:
                task.doc_to_choice(document)
        except Exception as error:
            where = f"{source.place}, document {row + 1}"
            raise DataError(f"task {source.task} cannot use {where}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the first cause of an error in one line."""
    return _reason(error.__cause__) if isinstance(error.__cause__, Exception) else reason_of(error)


def _evaluate(
    runtime: Runtime,
    tasks: Mapping[str, Any],
    limit: int | None,
    seed: int,
    max_length: int | None,
    add_bos: bool | None = None,
) -> dict[str, TaskScores]:
    """Run lm-eval's `evaluate`; `simple_evaluate` would also describe the machine, for which it runs programs."""
    if not tasks:
        return {}
    evaluate = lm_eval_module("lm_eval").evaluate
    for task in tasks.values():
        task.set_config("num_fewshot", task.get_config("num_fewshot") or 0)
        task.set_fewshot_seed(seed)
    for set_seed in (random.seed, numpy.random.seed, torch.manual_seed):
        set_seed(seed)
    model = harness_model(runtime, max_length, add_bos)
    try:
        result = evaluate(lm=model, task_dict={"tasks": dict(tasks), "groups": {}}, limit=limit, bootstrap_iters=0)
    except OverflowError as error:
        raise ModelError("a perplexity is too large for a float: the model predicts nothing") from error
    return {name: _scores(task, name, result) for name, task in tasks.items()}


def harness_model(runtime: Runtime, max_length: int | None, add_bos: bool | None = None) -> Any:
    """Return a model for lm-eval; `max_length` is its maximum context in tokens, by default that of its config.

    `add_bos` is whether a BOS token starts a prompt, by default as the tokenizer says.
    """
    return lm_eval_module("lm_eval.models.huggingface").HFLM(
        pretrained=runtime.model,
        backend="causal",
        tokenizer=copy.deepcopy(runtime.tokenizer),  # lm-eval adds a padding token to it
        max_length=max_length,
        add_bos_token=add_bos,
        batch_size=BATCH[runtime.device.type],
    )


def _scores(task: Any, name: str, result: Mapping[str, Any]) -> TaskScores:
    """Return lm-eval's result for one task as plain numbers, with the standard error of each metric that is a mean."""
    from lm_eval.api.metrics import mean, mean_stderr

    samples = result["samples"][name]
    responses = (response for sample in samples for several in sample["resps"] for response in several)
    firsts = (response[0] if isinstance(response, tuple) else response for response in responses)  # or texts
    if any(isinstance(first, float) and math.isnan(first) for first in firsts):
        raise ModelError(f"the model's predictions for task {name} are NaN")
    metrics: dict[str, float | None] = {}
    errors: dict[str, float | None] = {}
    better: dict[str, bool] = {}
    for key, value in result["results"][name].items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, Real):
            continue
        label = metric if filter_name == "none" else key
        metrics[label] = plain(float(value))
        better[label] = bool(task.higher_is_better().get(metric, True))
        values = [sample[metric] for sample in samples if sample["filter"] == filter_name and metric in sample]
        if task.aggregation().get(metric) is mean and len(values) > 1:
            is_extreme = {*values} in ({0}, {1})  # none or all are right, which lm-eval gives an error of 0
            error = share_error(sum(values), len(values)) if is_extreme else mean_stderr(values)
            errors[label] = plain(float(error))
    return TaskScores(
        metrics=metrics, stderr=errors, higher_is_better=better, version=result["versions"][name],
        samples=int(result["n-samples"][name]["effective"]),
    )  # fmt: skip


@contextmanager
def silence() -> Iterator[None]:
    """Hide what lm-eval and `datasets` log, warn, print and draw; the reporter shows progress."""
    from tqdm.std import tqdm

    draw, level = tqdm.__init__, logging.root.manager.disable

    def hidden(self: Any, *arguments: Any, **options: Any) -> None:
        draw(self, *arguments, **{**options, "disable": True})

    tqdm.__init__ = hidden
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        tqdm.__init__ = draw
        logging.disable(level)
