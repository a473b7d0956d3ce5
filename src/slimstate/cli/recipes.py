"""A recipe: tables and figures of the paper as a list of commands, at the paper's scale and at a small one.

    title = "…"
    about = "…"
    reproduces = ["tab:mixer_scaling"]   # the labels that these have in the paper's source
    [paper]                              # values for the names in braces; [small] holds those that differ
    models = ["A", {model = "B", key_dims = [179, 153]}]
    key_dims = [89, 76]
    [[steps]]
    run = "prune {model} --key-dim {key_dim} --out {out}/{model:name}-{key_dim}"
    each = {model = "models", key_dim = "key_dims"}   # for every member of the first list every one of the second

A member of a list may be a table: its entries are names then, in place of the values of all, and the lists that come
after it in `each` may be among them. Above A is cut to 89 and 76, B to 179 and 153.

`{out}` is where the results go, `{root}` the folder above the recipe's, `{demo}` that of the bundled model, `{built}`
where other recipes put their results. A word `{*name}` becomes all words of a list, and for a value that is a path
`{name:name}` is its last part. `only` keeps a step to one scale. Another value for a list names its members with
commas, a table by any text in it or the end of one: `models=B`. Steps that are done are remembered, so that a recipe
goes on where it was stopped.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from string import Formatter
from typing import Any

from slimstate.records.base import versions
from slimstate.records.recipe import RecipeRecord, StepDone
from slimstate.system import bundled, distributed
from slimstate.system.atomic import check_place
from slimstate.system.errors import DataError, OutputError, PlanError, quoted
from slimstate.system.interruption import STOP
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.run_folders import locked_folder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCALES = ("paper", "small")
PROGRESS = "recipe.json"
MOST_COMMANDS = 10_000
RESUMED = ("recover", "train")  # verbs that go on where they were stopped
REPLACING = ("prune", *RESUMED)  # verbs that write a folder which must not be there
Execute = Callable[[list[str]], object]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command with names in braces, run once for every combination of the lists that `each` names."""

    run: str
    each: Mapping[str, str] = field(default_factory=dict)
    only: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.run, str) or not self.run.strip():
            raise ValueError("`run` is a command, and not empty")
        if not isinstance(self.each, Mapping) or not all(isinstance(name, str) for name in self.each.values()):
            raise ValueError(f"`each` is a table of names of lists, not {self.each!r}")
        if self.only not in (None, *SCALES):
            raise ValueError(f"`only` is one of {', '.join(SCALES)}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A file of steps, and the values for their names at each scale."""

    path: Path
    title: str
    about: str
    values: Mapping[str, Mapping[str, Any]]
    steps: tuple[Step, ...]
    reproduces: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Recipe:
        try:
            with path.open("rb") as file:
                data = tomllib.load(file)
            odd = data.keys() - {"title", "about", "reproduces", "steps", *SCALES}
            if odd:
                raise ValueError(f"{sorted(odd)[0]} is no part of a recipe")
            steps = tuple(Step(**entry) for entry in data["steps"])
            values = {scale: dict(data[scale]) for scale in SCALES}
            labels = tuple(map(str, data.get("reproduces", ())))
            title, about = str(data["title"]), str(data["about"]).strip()
            return cls(path=path, title=title, about=about, values=values, steps=steps, reproduces=labels)
        except OSError as error:
            raise DataError(f"cannot read recipe {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path} is not a recipe: {type(error).__name__} {error}") from error

    def commands(self, scale: str, out: Path, changes: Mapping[str, str] | None = None) -> list[list[str]]:
        """Every command in its order, as words; `changes` replace values of the recipe."""
        known = self._values(scale, out, changes or {})
        made = (
            self._words(step, names)
            for step in self.steps
            if step.only in (None, scale)
            for names in self._combinations(known, list(step.each.items()))
        )
        commands = list(islice(made, MOST_COMMANDS + 1))
        if len(commands) > MOST_COMMANDS:
            raise DataError(f"{self.path} has more than {MOST_COMMANDS:,} commands")
        return commands

    def _combinations(self, known: Mapping[str, Any], each: Sequence[tuple[str, str]]) -> Iterator[Mapping[str, Any]]:
        """All names with their values, once for every member of the lists."""
        if not each:
            yield known
            return
        (name, listed), *others = each
        if not isinstance(known.get(listed), list):
            raise DataError(f"{self.path}: {listed} is no list of values")
        for member in known[listed]:
            entries = member if isinstance(member, Mapping) else {name: member}
            yield from self._combinations({**known, **entries}, others)

    def _values(self, scale: str, out: Path, changes: Mapping[str, str]) -> dict[str, Any]:
        values = {**self.values["paper"], **(self.values["small"] if scale == "small" else {})}
        for name, text in changes.items():
            if name not in values:
                raise PlanError(f"{self.path} has no value {name}; there are {', '.join(values)}")
            values[name] = _members(name, text, values) if isinstance(values[name], list) else text
        ours = self.path in bundled.recipes().values()
        root = Path.cwd() if ours else self.path.absolute().parent.parent
        places = {"out": out, "root": root, "demo": bundled.bundled("demo"), "built": root / "build" / "recipes"}
        with self._named("its values"):
            return {**{name: _filled(value, places) for name, value in values.items()}, **places}

    def _words(self, step: Step, known: Mapping[str, Any]) -> list[str]:
        words: list[str] = []
        with self._named(f"step {step.run!r}"):
            for word in shlex.split(step.run):
                if word.startswith("{*") and word.endswith("}"):
                    listed = known[word[2:-1]]
                    if not isinstance(listed, list):
                        raise ValueError(f"{word[2:-1]} is no list of values")
                    words += map(str, listed)
                else:
                    words.append(_filled(word, known))
            if not words or words[0] == "run":
                raise ValueError("a step is one of the other commands")
            if any("\0" in word for word in words):
                raise ValueError("a word holds the character 0")
        return words

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """What is wrong with a part of the recipe, in one line."""
        try:
            yield
        except (KeyError, ValueError, IndexError, RecursionError) as error:
            raise DataError(f"{self.path}: {what}: {type(error).__name__} {error}") from error


def _members(name: str, text: str, values: Mapping[str, Any]) -> list[Any]:
    """The members that a text names, with commas between them; a table by any of its texts, or the end of a path."""
    tables = [member for member in values[name] if isinstance(member, Mapping)]
    texts = [(value, table) for table in tables for value in table.values() if isinstance(value, str)]
    named = {**{Path(value).name: table for value, table in texts}, **dict(texts)}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    alone = {key for table in tables for key in table} - values.keys()  # what only these tables say
    if len(alone) > 1 and (unknown := [part for part in parts if part not in named]):
        raise PlanError(f"--set {name}={text}: there is no {unknown[0]}; there are {', '.join(dict(texts))}")
    return [named.get(part, part) for part in parts]


class _Names(Formatter):
    """Values by name; lists with commas between their members; with `:name`, the last part of a path."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        if field_name not in kwargs:  # nor what a value has inside
            raise KeyError(field_name)
        return kwargs[field_name], field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "name":
            return Path(str(value)).name
        if format_spec:
            raise ValueError(f"after a colon there is only `name`, not {format_spec}")
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _filled(value: Any, known: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_filled(member, known) for member in value]
    if isinstance(value, Mapping):
        return {name: _filled(entry, known) for name, entry in value.items()}
    return _Names().vformat(value, (), dict(known)) if isinstance(value, str) else value


def recipe_named(name: str) -> Path:
    """A file of one's own, or a recipe that comes with slimstate, by its name."""
    path, known = Path(name), bundled.recipes()
    if path.is_file():
        return path
    if path.suffix in ("", ".toml") and path.stem in known:
        return known[path.stem]
    raise DataError(f"no file {quoted(name)} and no recipe of that name; there are {', '.join(known)}")


def results_of(recipe: Path) -> Path:
    """Where a recipe puts its results unless told otherwise."""
    return Path("build") / "recipes" / recipe.stem


def run_recipe(
    recipe: Recipe,
    execute: Execute,
    *,
    accept: Execute = lambda words: None,
    scale: str = "paper",
    out: Path | None = None,
    changes: Mapping[str, str] | None = None,
    reporter: Reporter = SILENT,
) -> RecipeRecord:
    """Run the steps that are not done yet; returns what was done, which `out` also remembers.

    What a step wrote is replaced only where this recipe wrote it: it remembers that before a step begins.
    """
    folder = results_of(recipe.path) if out is None else out
    check_place(folder, folder=True)
    commands = recipe.commands(scale, folder, changes)
    for words in commands:
        accept(words)
    with ExitStack() as stack:
        distributed.from_main(lambda: stack.enter_context(locked_folder(folder)))
        record = RecipeRecord(
            recipe=str(recipe.path), title=recipe.title, scale=scale, versions=versions(), out=str(folder),
            **distributed.from_main(lambda: _earlier(folder / PROGRESS, list(map(shlex.join, commands)))),
        )  # fmt: skip
        stack.enter_context(STOP.saying(lambda: _kept(folder, len(commands))))
        ran = False  # a report is made again after whatever it reports on
        for number, words in enumerate(commands, start=1):
            place, command = f"step {number} of {len(commands)}", shlex.join(words)
            if record.has(command) and _still_there(words) and (_places(words) or not ran):
                reporter.say(f"{place}, done before: slimstate {command}")
                continue
            reporter.say(f"{place}: slimstate {command}")
            more = _more_words(words, record.made)
            record = replace(record, made=tuple(dict.fromkeys([*record.made, *map(str, _places(words))])))
            distributed.from_main(partial(record.write, folder / PROGRESS))
            started = time.perf_counter()
            execute([*words, *more])
            ran = True
            record = record.after(StepDone(command=command, seconds=time.perf_counter() - started))
            distributed.from_main(partial(record.write, folder / PROGRESS))
        return record


def _kept(folder: Path, steps: int) -> str | None:
    if not (folder / PROGRESS).exists():
        return None
    done = len(RecipeRecord.read(folder / PROGRESS).steps)
    return f"{done} of {steps} steps are done, in {folder}; the same command goes on"


def _more_words(words: Sequence[str], made: Sequence[str]) -> list[str]:
    """What a step is told besides its words: to replace what this recipe wrote, and to go on after a stop."""
    force = False
    for place in _places(words):
        if place.is_file() or (words[0] in REPLACING and place.exists()):
            if str(place) not in made:
                raise OutputError(
                    f"{place} is there, and this recipe did not write it: move it, or choose another `out`"
                )
            force = words[0] in REPLACING
    return [*["--force"] * force, *["--resume"] * (words[0] in RESUMED)]


def _earlier(path: Path, commands: Sequence[str]) -> dict[str, Any]:
    """Those of the commands that an earlier run finished, and what it has written; files of 0.1 list only commands."""
    if not path.exists():
        return {}
    try:
        found = RecipeRecord.read(path)
        written = [place for step in found.steps for place in _places(shlex.split(step.command))]
    except (DataError, ValueError) as error:
        raise DataError(f"{path} does not say what was done: {error}; remove it to start anew") from error
    return {"steps": found.keeping(commands), "made": (*found.made, *map(str, written))}


def _still_there(words: Sequence[str]) -> bool:
    """Whether what a finished step wrote is where it wrote it."""
    return all(place.exists() for place in _places(words))


def _places(words: Sequence[str]) -> list[Path]:
    """Where a step writes."""
    spelt = [tuple(word.split("=", 1)) for word in words if word.startswith("--out=")]
    return [Path(place) for option, place in (*pairwise(words), *spelt) if option == "--out"]
