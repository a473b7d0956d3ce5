"""The tasks there are, and where their documents come from: a dataset of the hub, or local files in its place.

Unknown tasks and missing data are refused here, before a model is loaded.
"""

import difflib
import hashlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from slimstate.evaluation.options import TaskOptions
from slimstate.records.evaluation import TaskData
from slimstate.system import hub
from slimstate.system.errors import DataError, SlimstateError
from slimstate.system.input_files import expand_home
from slimstate.system.value import Value

PAPER = ("wikitext", "lambada_openai", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "piqa")
RECALL = ("recall_drop", "recall_fda", "recall_nq", "recall_squad", "recall_swde", "recall_triviaqa")
SUITES = {"paper": PAPER, "recall": RECALL}
RECALL_FOLDER = Path(__file__).parent / "recall_tasks"
READERS = {".jsonl": "json", ".parquet": "parquet"}  # their names in `datasets`
SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
TASK_NAME = re.compile(rb"^[\"']?task[\"']?:[ \t]*[\"']?([^\s\"'#\[{!]+)", re.MULTILINE)


class Source(Value):
    """Where the documents of a task come from: the hub, or `files`, one for every split that the task names."""

    task: str
    place: str
    files: Mapping[str, Path]

    @property
    def data(self) -> TaskData:
        """The place and, of files, a digest of their bytes."""
        if not self.files:
            return TaskData(path=self.place)
        total = hashlib.sha256()
        for path in sorted(set(self.files.values())):
            total.update(path.read_bytes())
        return TaskData(path=self.place, digest=f"sha256:{total.hexdigest()}")

    def overrides(self, folder: Path) -> dict[str, object]:
        """Return changes to the task's config; the cache lies in `folder`, so that files are always read anew."""
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


def resolve_tasks(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the tasks of suites, names and comma lists of both, each once; refuse unknown ones."""
    parts = [part.strip() for part in (names if isinstance(names, str) else ",".join(names)).split(",")]
    tasks = dict.fromkeys(name for part in parts if part for name in SUITES.get(part, (part,)))
    if not tasks:
        raise DataError(f"no task is named; there are the suites {', '.join(SUITES)} and the tasks of lm-eval")
    _lm_eval_folder()
    for name in tasks:
        if name not in (*PAPER, *RECALL) and name not in task_files():
            near = difflib.get_close_matches(name, [*SUITES, *task_files()], n=3)
            hint = f"nearest: {', '.join(near)}" if near else "`lm_eval ls subtasks` lists them"
            raise DataError(f"unknown task {name!r} (groups of tasks are not supported); {hint}")
    return tuple(tasks)


def find_sources(options: TaskOptions, manager: Any = None) -> tuple[Source, ...]:
    """Return where the documents of each task come from; refuse missing files and a hub that cannot be reached.

    `manager` is an index of lm-eval that has the tasks.
    """
    if not options.tasks:
        return ()
    names = resolve_tasks(options.tasks)
    manager = manager or task_manager(names)
    configs = {name: manager.task_index[name].cfg for name in names}
    if options.task_data is None:
        return tuple(_hub_source(name, config) for name, config in configs.items())
    folder = expand_home(options.task_data)
    if not folder.is_dir():
        raise DataError(f"no folder {options.task_data} of task data")
    return tuple(_local_source(name, config, folder) for name, config in configs.items())


@cache
def task_files() -> dict[str, Path]:
    """Return the file of every task that lm-eval or slimstate ships, by task.

    The index of lm-eval parses all of them, which takes ten seconds; the name is on a line of its own in each.
    """
    files: dict[str, Path] = {}
    for folder in (RECALL_FOLDER, _lm_eval_folder() / "tasks"):
        for path in sorted(folder.rglob("*.yaml")):
            name = TASK_NAME.search(path.read_bytes())
            if name:
                files.setdefault(name[1].decode(), path)
    return files


def _lm_eval_folder() -> Path:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise SlimstateError("lm-eval is not installed: pip install 'slimstate[eval]'")
    return Path(spec.origin).parent


def task_manager(names: Sequence[str]) -> Any:
    """Return an index of lm-eval of the folders that contain these tasks."""
    folders = sorted({str(task_files()[name].parent) for name in names})
    return lm_eval_module("lm_eval.tasks").TaskManager(include_path=folders, include_defaults=False)


def lm_eval_module(name: str) -> Any:
    """Import a module of lm-eval, which is an extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SlimstateError(f"lm-eval cannot be imported ({error}): pip install 'slimstate[eval]'") from error


def _hub_source(name: str, config: Mapping[str, Any]) -> Source:
    from huggingface_hub import constants

    place = ":".join(str(part) for part in (config.get("dataset_path"), config.get("dataset_name")) if part)
    if not constants.is_offline_mode() and not hub.is_reachable():
        raise DataError(
            f"task {name}: the hub cannot be reached for its dataset {place}; give a folder of files with `task_data`,"
            " or set HF_HUB_OFFLINE=1 where the dataset was downloaded before"
        )
    return Source(task=name, place=place or "the task's own", files={})


def _local_source(name: str, config: Mapping[str, Any], folder: Path) -> Source:
    """Return the files of a task; that of the split to evaluate also serves splits without a file."""
    main_split = config.get("test_split") or config.get("validation_split")
    if main_split is None:
        raise DataError(f"task {name} loads its dataset in Python: `task_data` cannot replace it")
    main = _main_file(name, main_split, folder)
    fewshot = (config.get("fewshot_config") or {}).get("split")
    splits = {split for split in (fewshot, *map(config.get, SPLITS)) if split}
    own = {split: main.with_name(f"{split}{main.suffix}") for split in splits if main.parent != folder}
    files = {split: own[split] if split in own and own[split].is_file() else main for split in sorted(splits)}
    examples = fewshot or config.get("fewshot_split") or config.get("training_split") or main_split
    if config.get("num_fewshot") and examples != main_split and files[examples] == main:
        raise DataError(
            f"task {name} shows {config['num_fewshot']} examples from another split: "
            f"give {name}/{examples}{main.suffix} next to {name}/{main_split}{main.suffix} in {folder}"
        )
    return Source(task=name, place=str(main if main.parent == folder else main.parent), files=files)


def _main_file(name: str, split: str, folder: Path) -> Path:
    paths = [folder / f"{stem}{suffix}" for stem in (name, f"{name}/{split}") for suffix in READERS]
    for path in paths:
        if path.is_file() and path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        if path.is_file():
            return path
    names = ", ".join(str(path.relative_to(folder)) for path in paths)
    raise DataError(f"no data for task {name} in {folder}: looked for {names}")
