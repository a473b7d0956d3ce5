"""`slimstate run`: repeat the work of a config, or run a recipe, which is a list of configs.

A config is what lies beside a result, `slimstate_config.json`: a command, its inputs and its options. A recipe is a
TOML file that reproduces tables and figures of the paper; docs/guides/paper.md describes it. Steps that are done are
recorded, so that a recipe continues where it was interrupted.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import Any

from slimstate.core.file_names import CONFIG
from slimstate.records.base import versions
from slimstate.records.folder import is_record
from slimstate.records.numbers import plural
from slimstate.records.provenance import RecipeRecord, command_line
from slimstate.system import bundled, distributed
from slimstate.system.atomic import check_place
from slimstate.system.errors import DataError, OutputError, PlanError, quoted
from slimstate.system.interruption import STOP
from slimstate.system.json_files import JsonObject, read_json
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.run_folders import locked_folder
from slimstate.system.value import Value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCALES = ("paper", "small")
PROGRESS = "recipe.json"
MAX_STEPS = 10_000
RESUMABLE = ("recover", "train")  # commands with an option `resume`
REPLACING = ("analyze", "prune", "reconstruct", *RESUMABLE)  # commands that write a folder, with an option `force`
STEP_KEYS = ("each", "only", "options")  # of a step; all others are the config
Config = dict[str, Any]
Execute = Callable[[Config], object]


def read_config(path: Path) -> Config | None:
    """Read the config of one run from a TOML or JSON file, a record, or a result's folder; None for a recipe."""
    if path.is_dir():
        record = next((file for file in sorted(path.glob("*.json")) if is_record(file)), None)
        if record is not None and not (path / CONFIG).exists():
            raise DataError(f"{quoted(path)} has no {CONFIG}: name a record in it, such as {quoted(record)}")
        path = path / CONFIG
    if path.suffix == ".toml":
        data = _read_toml(path)
        if "steps" in data and "command" not in data:  # `steps` is also an option of some commands
            return None
    else:
        contents = dict(read_json(path, DataError))
        data = contents["config"] if isinstance(contents.get("config"), dict) else contents
        if data is contents and "kind" in contents:
            command = quoted(contents.get("command") or "an unknown command")
            raise DataError(f"{quoted(path)} is a record that has no config to run; it was written by {command}")
    if not isinstance(data.get("command"), str):
        raise DataError(f"{quoted(path)} is not a config: it must name its `command`")
    return data


def _read_toml(path: Path) -> Config:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise DataError(f"cannot read {quoted(path)}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{quoted(path)} is not TOML: {type(error).__name__} {quoted(error)}") from error


class Recipe(Value):
    """Steps, and the values for the names in them at each scale."""

    path: Path
    title: str
    about: str
    values: Mapping[str, Mapping[str, Any]]
    steps: tuple[Mapping[str, Any], ...]
    reproduces: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        data = _read_toml(path)
        try:
            if unknown := sorted(data.keys() - {"title", "about", "reproduces", "steps", *SCALES}):
                raise ValueError(f"a recipe has no {unknown[0]}")
            values = {scale: dict(data[scale]) for scale in SCALES}
            steps = tuple(_check_step(dict(step)) for step in data["steps"])
            labels = tuple(map(str, data.get("reproduces", ())))
            title, about = str(data["title"]), str(data["about"]).strip()
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{quoted(path)} is not a recipe: {type(error).__name__} {quoted(error)}") from error
        return cls(path=path, title=title, about=about, values=values, steps=steps, reproduces=labels)

    def configs(self, scale: str, out: Path, changes: Mapping[str, str] | None = None) -> list[Config]:
        """Return the config of every step in order; `changes` replace values of the recipe."""
        values = self._values(scale, out, changes or {})
        configs = (
            self._config(step, names)
            for step in self.steps
            if step.get("only") in (None, scale)
            for names in self._combinations(values, list(step.get("each", {}).items()))
        )
        first = list(islice(configs, MAX_STEPS + 1))
        if len(first) > MAX_STEPS:
            raise DataError(f"{self.path} has more than {MAX_STEPS:,} steps")
        return first

    def _combinations(self, values: Mapping[str, Any], each: Sequence[tuple[str, str]]) -> Iterator[Mapping[str, Any]]:
        """Yield all values by name, once for every combination of the members of the lists."""
        if not each:
            yield values
            return
        (name, list_name), *others = each
        if not isinstance(values.get(list_name), list):
            raise DataError(f"{self.path}: {list_name} is not a list of values")
        for member in values[list_name]:
            entries = member if isinstance(member, Mapping) else {name: member}
            yield from self._combinations({**values, **entries}, others)

    def _values(self, scale: str, out: Path, changes: Mapping[str, str]) -> dict[str, Any]:
        values = {**self.values["paper"], **(self.values["small"] if scale == "small" else {})}
        for name, text in changes.items():
            if name not in values:
                raise PlanError(f"{self.path} has no value {name}; there are {', '.join(values)}")
            values[name] = _parse_change(name, text, values)
        root = Path.cwd() if self.path in bundled.recipes().values() else self.path.absolute().parent.parent
        places = {"out": out, "root": root, "demo": bundled.bundled_folder("demo"), "built": root / "build" / "recipes"}
        with self._errors_in("its values"):
            texts = {name: str(place) for name, place in places.items()}
            return {**{name: _fill(value, texts) for name, value in values.items()}, **texts}

    def _config(self, step: Mapping[str, Any], values: Mapping[str, Any]) -> Config:
        with self._errors_in(f"step {step['command']}"):
            config = {name: _fill(value, values) for name, value in step.items() if name not in STEP_KEYS}
            tables = _fill(step.get("options", []), values)
            for table in tables if isinstance(tables, list) else [tables]:
                if not isinstance(table, Mapping):
                    raise ValueError("`options` must name tables")
                config |= table
            return _check_step({name: value for name, value in config.items() if value != ""})

    @contextmanager
    def _errors_in(self, part: str) -> Iterator[None]:
        try:
            yield
        except (KeyError, ValueError, IndexError, RecursionError) as error:
            raise DataError(f"{self.path}: {part}: {type(error).__name__} {quoted(error)}") from error


def _check_step(step: Config) -> Config:
    if not isinstance(step.get("command"), str) or step["command"] == "run":
        raise ValueError("a step must name a `command` other than run")
    each = step.get("each", {})
    if not isinstance(each, Mapping) or not all(isinstance(name, str) for name in each.values()):
        raise ValueError(f"`each` must be a table of names of lists, got {each!r}")
    if step.get("only") not in (None, *SCALES):
        raise ValueError(f"`only` must be one of {', '.join(SCALES)}")
    return step


def _parse_change(name: str, text: str, values: Mapping[str, Any]) -> Any:
    """Return the new value of a name; commas separate members of a list, tables go by a text or file name in them."""
    value = values[name]
    if isinstance(value, Mapping):
        raise PlanError(f"--set {name}: it is a table of options; change the recipe")
    if not isinstance(value, list):
        return _parse_number(name, text, type(value)) if type(value) in (int, float) else text
    tables = [member for member in value if isinstance(member, Mapping)]
    texts = [(entry, table) for table in tables for entry in table.values() if isinstance(entry, str)]
    by_name = {**{Path(entry).name: table for entry, table in texts}, **dict(texts)}
    numbers = value and all(isinstance(member, int) for member in value)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    only_in_tables = {key for table in tables for key in table} - values.keys()
    if len(only_in_tables) > 1 and (unknown := [part for part in parts if part not in by_name]):
        raise PlanError(f"--set {name}={text}: there is no {unknown[0]}; there are {', '.join(dict(texts))}")
    return [_parse_number(name, part, int) if numbers else by_name.get(part, part) for part in parts]


def _parse_number(name: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError as error:
        raise PlanError(f"--set {name}: it must be a number, got {quoted(text)}") from error


def _fill(value: Any, values: Mapping[str, Any]) -> Any:
    """Fill in names in braces; a text that is one name takes its value as it is, and a list joins its parent list."""
    if isinstance(value, list):
        items: list[Any] = []
        for part in value:
            filled = _fill(part, values)
            items += filled if isinstance(part, str) and isinstance(filled, list) else [filled]
        return items
    if isinstance(value, Mapping):
        return {name: _fill(entry, values) for name, entry in value.items()}
    if not isinstance(value, str):
        return value
    if value.startswith("{") and value.endswith("}") and value[1:-1] in values:
        return values[value[1:-1]]
    parts = []
    for text, name, form, conversion in Formatter().parse(value):
        if form not in (None, "", "name") or conversion is not None:
            raise ValueError(f"only `name` may follow a colon, got {value}")
        filled = "" if name is None else str(values[name])
        parts += [text, Path(filled).name if form else filled]
    return "".join(parts)


def recipe_path(name: str) -> Path:
    """Return the path of a file, or of a recipe that comes with slimstate by its name."""
    path, recipes = Path(name), bundled.recipes()
    if path.exists():
        return path
    if path.suffix in ("", ".toml") and path.stem in recipes:
        return recipes[path.stem]
    raise DataError(f"no file {quoted(name)} and no recipe of that name; there are {', '.join(recipes)}")


def default_results(recipe: Path) -> Path:
    """Return the folder for the results of a recipe."""
    return Path("build") / "recipes" / recipe.stem


def run_recipe(
    recipe: Recipe, execute: Execute, *, check: Execute = lambda config: None, scale: str = "paper",
    out: Path | None = None, changes: Mapping[str, str] | None = None, reporter: Reporter = SILENT,
) -> RecipeRecord:  # fmt: skip
    """Run the steps that are not done yet, after a `check` of all configs; return the record of all steps."""
    folder = default_results(recipe.path) if out is None else out
    check_place(folder, folder=True)
    configs = recipe.configs(scale, folder, changes)
    for config in configs:
        check(config)
    lines = list(map(command_line, configs))
    with ExitStack() as stack:
        distributed.from_main(lambda: stack.enter_context(locked_folder(folder)))
        record = RecipeRecord(
            recipe=str(recipe.path), title=recipe.title, scale=scale, versions=versions(), out=str(folder),
            **distributed.from_main(lambda: _read_progress(folder / PROGRESS, lines)),
        )  # fmt: skip
        stack.enter_context(STOP.with_message(lambda: _describe_progress(folder, len(configs))))
        written: list[Any] = []  # by the steps that ran now; what reads it runs again
        for number, (config, line) in enumerate(zip(configs, lines, strict=True), start=1):
            place, target = f"step {number} of {len(configs)}", Path(str(config["out"])) if "out" in config else None
            inputs = [str(value) for name, value in config.items() if name != "out"]
            reads_new = any(path in value for path in filter(None, written) for value in inputs)
            is_there = target.exists() if target is not None else not written
            if line in record.steps and is_there and not reads_new:
                reporter.say(f"{place}, done before: {line}")
                continue
            reporter.say(f"{place}: {line}")
            more = _run_options(config, target, record.outputs)
            if target is not None and str(target) not in record.outputs:
                record = replace(record, outputs=(*record.outputs, str(target)))
            distributed.from_main(partial(record.write, folder / PROGRESS))
            started = time.perf_counter()
            execute({**config, **more})
            written += [config.get("out"), config.get("control_out")]
            record = replace(record, steps={**record.steps, line: time.perf_counter() - started})
            distributed.from_main(partial(record.write, folder / PROGRESS))
        return record


def _describe_progress(folder: Path, steps: int) -> str | None:
    if not (folder / PROGRESS).exists():
        return None
    done = len(RecipeRecord.read(folder / PROGRESS).steps)
    return f"{done} of {plural(steps, 'step')} done, in {folder}; the same command continues"


def _run_options(config: Config, target: Path | None, outputs: Sequence[str]) -> Config:
    """Return the options that replace what this recipe wrote, and continue what was interrupted."""
    command = config["command"]
    exists = target is not None and (target.is_file() or (command in REPLACING and target.exists()))
    if exists and str(target) not in outputs:
        raise OutputError(f"{target} exists and was not written by this recipe: move it, or choose another `out`")
    force = {"force": True} if exists and command in REPLACING else {}
    return {**force, **({"resume": True} if command in RESUMABLE else {})}


def _read_progress(path: Path, lines: Sequence[str]) -> JsonObject:
    """Return the steps that an earlier run finished, and what it has written."""
    if not path.exists():
        return {}
    try:
        record = RecipeRecord.read(path)
    except (DataError, ValueError) as error:
        raise DataError(f"{path} is not the progress of a recipe: {error}; remove it to start over") from error
    steps = {line: seconds for line, seconds in record.steps.items() if line in lines}
    return {"steps": steps, "outputs": record.outputs}
