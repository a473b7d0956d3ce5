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
from slimstate.system.errors import DataError, SlimstateError, reason_of
from slimstate.system.input_files import expand_home
from slimstate.system.value import Value

PAPER = ("wikitext", "lambada_openai", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "piqa")
RECALL = ("recall_drop", "recall_fda", "recall_nq", "recall_squad", "recall_swde", "recall_triviaqa")
SUITES = {"paper": PAPER, "recall": RECALL}
RECALL_FOLDER = Path(__file__).parent / "recall_tasks"
READERS = {".jsonl": "json", ".parquet": "parquet"}  # their names in `datasets`
YAML = (".yaml", ".yml")
SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
TASK_NAME = re.compile(rb"^[\"']?task[\"']?:[ \t]*[\"']?([^\s\"'#\[{!]+)", re.MULTILINE)


class Source(Value):
    """Where the documents of a task come from: the hub, or `files`, one for every split that the task names.

    `own` are files that define a task of the user's: its YAML and the data that it names.
    """

    task: str
    place: str
    files: Mapping[str, Path]
    own: tuple[Path, ...] = ()

    @property
    def data(self) -> TaskData:
        """The place and, of files, a digest of their bytes."""
        if not self.files and not self.own:
            return TaskData(path=self.place)
        total = hashlib.sha256()
        for path in sorted({*self.files.values(), *self.own}):
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


def resolve_tasks(names: str | Sequence[str], include_path: Path | None = None) -> tuple[str, ...]:
    """Return the tasks of suites, names, YAML files and comma lists of them, each once; refuse unknown ones."""
    parts = [part.strip() for part in (names if isinstance(names, str) else ",".join(names)).split(",")]
    tasks = dict.fromkeys(name for part in parts if part for name in SUITES.get(part, (_name_of(part),)))
    if not tasks:
        raise DataError(f"no task is named; there are the suites {', '.join(SUITES)} and the tasks of lm-eval")
    _lm_eval_folder()
    for name in tasks:
        if name not in (*PAPER, *RECALL) and name not in (files := task_files(include_path, *parts)):
            near = difflib.get_close_matches(name, [*SUITES, *files], n=3)
            hint = f"nearest: {', '.join(near)}" if near else "`lm_eval ls subtasks` lists them"
            raise DataError(f"unknown task {name!r} (groups of tasks are not supported); {hint}")
    return tuple(tasks)


def find_sources(options: TaskOptions, manager: Any = None) -> tuple[Source, ...]:
    """Return where the documents of each task come from; refuse missing files and a hub that cannot be reached.

    `manager` is an index of lm-eval that has the tasks.
    """
    if not options.tasks:
        return ()
    names, files = resolve_tasks(options.tasks, options.include_path), task_files(options.include_path, *options.tasks)
    manager = manager or task_manager(names, files)
    configs = {name: manager.task_index[name].cfg for name in names}
    if options.task_data is None:
        return tuple(_hub_source(name, config, files[name]) for name, config in configs.items())
    folder = expand_home(options.task_data)
    if not folder.is_dir():
        raise DataError(f"no folder {options.task_data} of task data")
    return tuple(_local_source(name, config, folder, files[name]) for name, config in configs.items())


def task_files(include_path: Path | None = None, *tasks: str) -> dict[str, Path]:
    """Return the file of every task by name: YAML files among `tasks`, those in a folder, and shipped ones."""
    folder = None if include_path is None else expand_home(include_path)
    if folder is not None and not folder.is_dir():
        raise DataError(f"no folder {include_path} of tasks")
    parts = [part.strip() for task in tasks for part in task.split(",")]
    own = {_name_of(part): expand_home(part) for part in parts if part.endswith(YAML)}
    return {**_files_in((RECALL_FOLDER, _lm_eval_folder() / "tasks")), **_files_in((folder,) if folder else ()), **own}


def _name_of(task: str) -> str:
    """Return the name of the task in a YAML file, or the name that was given."""
    if not task.endswith(YAML):
        return task
    path = expand_home(task)
    if not path.is_file():
        raise DataError(f"no file {task} of a task")
    if (name := TASK_NAME.search(path.read_bytes())) is None:
        raise DataError(f"{task} is not a task of lm-eval: it must have a line `task: NAME`")
    return name[1].decode()


@cache
def _files_in(folders: tuple[Path, ...]) -> dict[str, Path]:
    """Return the file of every task in these folders, by task.

    The index of lm-eval parses all of them, which takes ten seconds; the name is on a line of its own in each.
    """
    files: dict[str, Path] = {}
    for folder in folders:
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


def task_manager(names: Sequence[str], files: Mapping[str, Path]) -> Any:
    """Return an index of lm-eval of the folders that contain shipped tasks, and of the files of others."""
    paths, roots = {files[name] for name in names}, (RECALL_FOLDER, _lm_eval_folder())
    shipped = {path for path in paths if any(path.is_relative_to(root) for root in roots)}
    folders = sorted({str(path.parent) for path in shipped})
    manager = lm_eval_module("lm_eval.tasks").TaskManager(include_path=folders, include_defaults=False)
    index, load_yaml = lm_eval_module("lm_eval.tasks._index").TaskIndex, lm_eval_module("lm_eval.tasks._yaml_loader")
    for path in sorted(paths - shipped):
        try:
            index.process_cfg(load_yaml.load_yaml(path, resolve_func=False), path, manager.task_index)
        except Exception as error:
            raise DataError(f"{path} is not a task of lm-eval: {reason_of(error)}") from error
    return manager


def lm_eval_module(name: str) -> Any:
    """Import a module of lm-eval, which is an extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SlimstateError(f"lm-eval cannot be imported ({error}): pip install 'slimstate[eval]'") from error


def _hub_source(name: str, config: Mapping[str, Any], file: Path) -> Source:
    """Return the dataset that a task names: of the hub, or local files."""
    from huggingface_hub import constants

    named = (config.get("dataset_kwargs") or {}).get("data_files") or ()
    groups = named.values() if isinstance(named, Mapping) else [named]
    paths = [Path(path) for group in groups for path in ([group] if isinstance(group, str) else group)]
    own = _own_files(*paths, file)
    place = ":".join(str(part) for part in (config.get("dataset_path"), config.get("dataset_name")) if part)
    if not paths and not constants.is_offline_mode() and not hub.is_reachable():
        raise DataError(
            f"task {name}: the hub cannot be reached for its dataset {place}; give a folder of files with `task_data`,"
            " or set HF_HUB_OFFLINE=1 where the dataset was downloaded before"
        )
    return Source(task=name, place=place or "the task's own", files={}, own=own)


def _local_source(name: str, config: Mapping[str, Any], folder: Path, file: Path) -> Source:
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
    place = str(main if main.parent == folder else main.parent)
    return Source(task=name, place=place, files=files, own=_own_files(file))


def _own_files(*paths: Path) -> tuple[Path, ...]:
    """Return the files among these that are not of lm-eval or slimstate, and may change."""
    shipped = (_lm_eval_folder(), RECALL_FOLDER)
    return tuple(path for path in paths if path.is_file() and not any(map(path.is_relative_to, shipped)))


def _main_file(name: str, split: str, folder: Path) -> Path:
    paths = [folder / f"{stem}{suffix}" for stem in (name, f"{name}/{split}") for suffix in READERS]
    for path in paths:
        if path.is_file() and path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        if path.is_file():
            return path
    names = ", ".join(str(path.relative_to(folder)) for path in paths)
    raise DataError(f"no data for task {name} in {folder}: looked for {names}")
