"""Which tasks there are, and where their documents come from: a dataset of the hub, or local files in its place.

Unknown tasks and missing data are refused here, before a model is loaded.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slimstate.system import hub
from slimstate.system.errors import DataError, SlimstateError
from slimstate.system.paths import expand_home

PAPER = ("wikitext", "lambada_openai", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "piqa")
RECALL = ("recall_drop", "recall_fda", "recall_nq", "recall_squad", "recall_swde", "recall_triviaqa")
SUITES = {"paper": PAPER, "recall": RECALL}
RECALL_FOLDER = Path(__file__).parent / "recall_tasks"
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

    def overrides(self, folder: Path) -> dict[str, object]:
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


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Documents of tasks: the first `limit` of each, from files in the folder `task_data` in place of hub datasets.

    `max_length` are the most tokens that they show a model at once, by default those that its config names.
    """

    task_data: str | Path | None = None
    limit: int | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_limit(self.limit)
        if self.max_length is not None and self.max_length < 2:
            raise DataError(f"`max_length` {self.max_length}: at least 2 tokens are needed")

    @property
    def task_folder(self) -> Path | None:
        return None if self.task_data is None else Path(self.task_data)


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise DataError(f"`limit` {limit}: at least 1 document is needed")


def sources(names: Sequence[str], data: Path | None = None) -> tuple[Source, ...]:
    """Where each task's documents will come from; a missing file and an unreachable hub are refused."""
    return sources_in(task_manager(names), names, data)


def sources_in(manager: Any, names: Sequence[str], data: Path | None) -> tuple[Source, ...]:
    """The same, with an index of lm-eval that is at hand."""
    configs = {name: manager.task_index[name].cfg for name in names}
    if data is None:
        return tuple(_hub_source(name, config) for name, config in configs.items())
    folder = expand_home(data)
    if not folder.is_dir():
        raise DataError(f"no folder {data} of task data")
    return tuple(_local_source(name, config, folder) for name, config in configs.items())


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


def task_manager(names: Sequence[str]) -> Any:
    """lm-eval's index of the folders that hold these tasks."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise SlimstateError(f"lm-eval cannot be imported ({error}): pip install 'slimstate[eval]'") from error
    folders = sorted({str(task_files()[name].parent) for name in names})
    return TaskManager(include_path=folders, include_defaults=False)


def _hub_source(name: str, config: Mapping[str, Any]) -> Source:
    from huggingface_hub import constants

    place = ":".join(str(part) for part in (config.get("dataset_path"), config.get("dataset_name")) if part)
    if not constants.is_offline_mode() and not hub.reachable():
        raise DataError(
            f"task {name}: the hub cannot be reached from here for its dataset {place}; give a folder of files "
            "with `task_data`, or set HF_HUB_OFFLINE=1 where the dataset was downloaded before"
        )
    return Source(task=name, place=place or "the task's own", files={})


def _local_source(name: str, config: Mapping[str, Any], folder: Path) -> Source:
    """The file of the split that is evaluated, which also serves the splits that have none of their own."""
    evaluated = config.get("test_split") or config.get("validation_split")
    if evaluated is None:
        raise DataError(f"task {name} loads its dataset in Python: `task_data` cannot take its place")
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
