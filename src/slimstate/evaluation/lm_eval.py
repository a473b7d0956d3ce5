"""Benchmarks of lm-eval on a model that is already loaded: the paper's seven, six recall tasks, or any other by name.

lm-eval owns prompts, requests and metrics. Added here: unknown tasks and missing data are refused before a model is
loaded, local files take the place of hub datasets, recall prompts are cut to 2K tokens with the model's tokenizer, and
the record is plain JSON.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib.util
import io
import logging
import math
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import count, islice
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from slimstate.models.load import Runtime
from slimstate.system import hub
from slimstate.system.errors import DataError, ModelError, SlimstateError
from slimstate.system.progress import SILENT, Reporter

PAPER = ("wikitext", "lambada_openai", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "piqa")
RECALL = ("recall_drop", "recall_fda", "recall_nq", "recall_squad", "recall_swde", "recall_triviaqa")
SUITES = {"paper": PAPER, "recall": RECALL}
AVERAGES = {
    "zero_shot": {
        "lambada_openai": "acc",
        "arc_easy": "acc_norm",
        "arc_challenge": "acc_norm",
        "hellaswag": "acc_norm",
        "winogrande": "acc",
        "piqa": "acc_norm",
    },
    "recall": dict.fromkeys(RECALL, "contains"),
}
RECALL_FOLDER = Path(__file__).parent / "recall_tasks"
BATCH = {"cpu": 1, "cuda": 8}
READERS = {".jsonl": "json", ".parquet": "parquet"}  # what `datasets` calls them
SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
TASK_NAME = re.compile(rb"^[\"']?task[\"']?:[ \t]*[\"']?([^\s\"'#\[{!]+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the documents of a task come from: the hub, or `files`, one for every split that the task names."""

    task: str
    place: str
    files: Mapping[str, Path]

    @property
    def digest(self) -> str | None:
        """Of the bytes of the files; None for the hub."""
        if not self.files:
            return None
        total = hashlib.sha256()
        for path in sorted(set(self.files.values())):
            total.update(path.read_bytes())
        return "sha256:" + total.hexdigest()

    def overrides(self, folder: Path) -> dict[str, Any]:
        """Changes to the task's config. A cache that lives for one run cannot serve a file as it was earlier."""
        if not self.files:
            return {}
        return {
            "dataset_path": READERS[next(iter(self.files.values())).suffix],
            "dataset_name": None,
            "custom_dataset": None,
            "dataset_kwargs": {
                "data_files": {split: str(path) for split, path in self.files.items()},
                "cache_dir": str(folder / self.task),
            },
        }


def resolve(names: str | Sequence[str]) -> tuple[str, ...]:
    """Task names from suites, names and comma lists of both, each once; one that does not exist is refused."""
    wanted = [part.strip() for part in (names if isinstance(names, str) else ",".join(names)).split(",")]
    found = dict.fromkeys(name for part in wanted if part for name in SUITES.get(part, (part,)))
    if not found:
        raise DataError(f"no task is named; there are the suites {', '.join(SUITES)} and the tasks of lm-eval")
    _lm_eval_folder()
    for name in found:
        if name not in (*PAPER, *RECALL) and name not in task_files():
            near = difflib.get_close_matches(name, [*SUITES, *task_files()], n=3)
            hint = f"nearest: {', '.join(near)}" if near else "`lm_eval ls subtasks` lists them"
            raise DataError(f"no task {name!r} (groups of tasks are not taken); {hint}")
    return tuple(found)


def sources(names: Sequence[str], data: Path | None = None) -> tuple[Source, ...]:
    """Where each task's documents will come from; a missing file and an unreachable hub are refused."""
    return _sources(_task_manager(names), names, data)


def run_tasks(
    runtime: Runtime,
    names: Sequence[str],
    *,
    data: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """The metrics of every task and their averages, as the part of a record.

    `data` is a folder of local files in place of hub datasets: TASK.jsonl or TASK.parquet, or a folder TASK with a
    file for each split. `limit` keeps the first documents of each task.
    """
    if limit is not None and limit < 1:
        raise DataError(f"--limit {limit}: at least 1 document is needed")
    names = resolve(names)
    reporter.say(f"lm-eval {version('lm_eval')}: {', '.join(names)}")
    with reporter.waiting(f"running {len(names)} tasks"), _silence(), TemporaryDirectory() as folder:
        manager = _task_manager(names)
        found = _sources(manager, names, data)
        loaded = {source.task: _load(manager, source, Path(folder), runtime.tokenizer) for source in found}
        for source in found:
            _try_documents(loaded[source.task], source, limit)
        recall = {name: task for name, task in loaded.items() if name in RECALL}
        others = {name: task for name, task in loaded.items() if name not in RECALL}
        scores = _evaluate(runtime, others, limit, seed)
        scores |= _evaluate(runtime, recall, limit, seed, max_length=_longest(recall))
    tasks = {
        source.task: {**scores[source.task], "data": {"path": source.place, "digest": source.digest}}
        for source in found
    }
    return {"tasks": tasks, "averages": averages(tasks), "seed": seed, "limit": limit, "lm_eval": version("lm_eval")}


def averages(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The paper's two means, each only where all its tasks are there."""
    return {
        label: sum(tasks[name]["metrics"][metric] for name, metric in members.items()) / len(members)
        for label, members in AVERAGES.items()
        if members.keys() <= tasks.keys()
    }


@cache
def task_files() -> dict[str, Path]:
    """The file of every task that lm-eval or slimstate ships.

    lm-eval's own index parses all of them, which takes ten seconds; the name is on a line of its own in each.
    """
    found: dict[str, Path] = {}
    for folder in (RECALL_FOLDER, _lm_eval_folder() / "tasks"):
        for path in sorted(folder.rglob("*.yaml")):
            name = TASK_NAME.search(path.read_bytes())
            if name:
                found.setdefault(name[1].decode(), path)
    return found


def _lm_eval_folder() -> Path:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise SlimstateError("lm-eval is not installed: pip install 'slimstate[eval]'")
    return Path(spec.origin).parent


def _task_manager(names: Sequence[str]) -> Any:
    """lm-eval's index of the folders that hold these tasks."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise SlimstateError(f"lm-eval cannot be imported ({error}): pip install 'slimstate[eval]'") from error
    folders = sorted({str(task_files()[name].parent) for name in names})
    return TaskManager(include_path=folders, include_defaults=False)


def _sources(manager: Any, names: Sequence[str], data: Path | None) -> tuple[Source, ...]:
    configs = {name: manager.task_index[name].cfg for name in names}
    if data is None:
        return tuple(_hub_source(name, config) for name, config in configs.items())
    folder = Path(data).expanduser()
    if not folder.is_dir():
        raise DataError(f"no folder {data} of task data")
    return tuple(_local_source(name, config, folder) for name, config in configs.items())


def _hub_source(name: str, config: Mapping[str, Any]) -> Source:
    from huggingface_hub import constants

    place = ":".join(str(part) for part in (config.get("dataset_path"), config.get("dataset_name")) if part)
    if not constants.is_offline_mode() and not hub.reachable():
        raise DataError(
            f"task {name}: the hub cannot be reached from here for its dataset {place}; give files with "
            "--task-data DIR, or set HF_HUB_OFFLINE=1 where the dataset was downloaded before"
        )
    return Source(task=name, place=place or "the task's own", files={})


def _local_source(name: str, config: Mapping[str, Any], folder: Path) -> Source:
    """The file of the split that is evaluated, which also serves the splits that have none of their own."""
    evaluated = config.get("test_split") or config.get("validation_split")
    if evaluated is None:
        raise DataError(f"task {name} loads its dataset in Python: --task-data cannot take its place")
    main = _evaluated_file(name, evaluated, folder)
    shown = (config.get("fewshot_config") or {}).get("split")
    asked = {split for split in (shown, *map(config.get, SPLITS)) if split}
    own = {split: main.with_name(f"{split}{main.suffix}") for split in asked if main.parent != folder}
    files = {split: own[split] if split in own and own[split].is_file() else main for split in sorted(asked)}
    examples = shown or config.get("fewshot_split") or config.get("training_split") or evaluated
    if config.get("num_fewshot") and examples != evaluated and files[examples] == main:
        raise DataError(
            f"task {name} shows {config['num_fewshot']} examples from another split: "
            f"give {name}/{examples}{main.suffix} next to {name}/{evaluated}{main.suffix} in {folder}"
        )
    return Source(task=name, place=str(main if main.parent == folder else main.parent), files=files)


def _evaluated_file(name: str, split: str, folder: Path) -> Path:
    places = [folder / f"{name}{suffix}" for suffix in READERS]
    places += [folder / name / f"{split}{suffix}" for suffix in READERS]
    for path in places:
        if path.is_file() and path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        if path.is_file():
            return path
    looked = ", ".join(str(path.relative_to(folder)) for path in places)
    raise DataError(f"no data for task {name} in {folder}: looked for {looked}")


def _load(manager: Any, source: Source, folder: Path, tokenizer: Any) -> Any:
    """lm-eval's task with its documents. In a group lm-eval lets a task's config be changed."""
    member = {"task": source.task, **source.overrides(folder)}
    if source.task in RECALL:
        member["metadata"] = {**manager.task_index[source.task].cfg["metadata"], "tokenizer": tokenizer}
    try:
        task = manager.load([{"group": "slimstate", "task": [member]}])["tasks"][source.task]
    except Exception as error:
        if source.files:
            raise DataError(f"task {source.task} cannot use {source.place}: {_reason(error)}") from error
        raise DataError(
            f"task {source.task}: its dataset {source.place} cannot be had ({_reason(error)}); "
            "give files with --task-data DIR"
        ) from error
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise DataError(f"task {source.task} runs code or shows images, which slimstate does not")
    return task


def _try_documents(task: Any, source: Source, limit: int | None) -> None:
    """Local documents may lack a field; that is said here, before the model has worked for hours."""
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


def _longest(recall: Mapping[str, Any]) -> int | None:
    """Tokens of the longest prompt and of what is written after it; of more lm-eval cuts the beginning off."""
    lengths = (task.prompt_tokens + task.config.generation_kwargs["max_gen_toks"] for task in recall.values())
    return max(lengths, default=None)


def _reason(error: Exception) -> str:
    """What went wrong first, in one line."""
    if isinstance(error.__cause__, Exception):
        return _reason(error.__cause__)
    return f"{type(error).__name__}: {hub.reason(error)}"


def _evaluate(
    runtime: Runtime, tasks: Mapping[str, Any], limit: int | None, seed: int, max_length: int | None = None
) -> dict[str, dict[str, Any]]:
    """lm-eval's own evaluation; of `simple_evaluate` only the report on the machine is missing, which runs programs."""
    if not tasks:
        return {}
    try:
        import numpy
        from lm_eval import evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise SlimstateError(f"lm-eval cannot be imported ({error}): pip install 'slimstate[eval]'") from error

    for task in tasks.values():
        task.set_config("num_fewshot", task.get_config("num_fewshot") or 0)
        task.set_fewshot_seed(seed)
    for plant in (random.seed, numpy.random.seed, torch.manual_seed):
        plant(seed)
    model = HFLM(
        pretrained=runtime.model,
        backend="causal",
        tokenizer=copy.deepcopy(runtime.tokenizer),  # lm-eval gives it a padding token
        max_length=max_length,
        batch_size=BATCH[runtime.device.type],
    )
    try:
        result = evaluate(lm=model, task_dict={"tasks": dict(tasks), "groups": {}}, limit=limit, bootstrap_iters=0)
    except OverflowError as error:
        raise ModelError("a perplexity is beyond what a float holds: the model predicts nothing") from error
    return {name: _score(task, name, result) for name, task in tasks.items()}


def _score(task: Any, name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """What lm-eval found for one task, with plain numbers, and the standard error of each metric that is a mean."""
    from lm_eval.api.metrics import mean, mean_stderr

    samples = result["samples"][name]
    if any(math.isnan(value) for value in _log_likelihoods(samples)):
        raise ModelError(f"the model's predictions for task {name} are NaN")
    metrics: dict[str, float | None] = {}
    errors: dict[str, float | None] = {}
    better: dict[str, bool] = {}
    for key, value in result["results"][name].items():
        metric, comma, kept = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, Real):
            continue
        label = metric if kept == "none" else key
        metrics[label] = _number(value)
        better[label] = bool(task.higher_is_better().get(metric, True))
        values = [sample[metric] for sample in samples if sample["filter"] == kept and metric in sample]
        if task.aggregation().get(metric) is mean and len(values) > 1:
            errors[label] = _number(mean_stderr(values))
    return {
        "metrics": metrics,
        "stderr": errors,
        "higher_is_better": better,
        "samples": int(result["n-samples"][name]["effective"]),
        "version": result["versions"][name],
    }


def _log_likelihoods(samples: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    for sample in samples:
        for responses in sample["resps"]:
            for response in responses:
                value = response[0] if isinstance(response, tuple) else response
                if isinstance(value, float):
                    yield value


def _number(value: Any) -> float | None:
    """A float, where JSON can say it."""
    return float(value) if math.isfinite(value) else None


@contextmanager
def _silence() -> Iterator[None]:
    """lm-eval and `datasets` log, warn, print and draw bars; the reporter has said what is going on."""
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
