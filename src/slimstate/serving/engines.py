"""What serving engines do with a cut model: rules by family and key dim, each with its evidence.

The rules are data, `engine_rules.json`. A rule was *run*, and names the command, or *read*, and names the source file.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any, Literal

from slimstate.checkpoints.reader import described_mixers
from slimstate.families.contract import Config
from slimstate.records.cut import Serving
from slimstate.records.schema import from_json
from slimstate.system.value import Value

TITLES: Mapping[str, str] = {
    "transformers": "transformers", "mlx": "mlx-lm", "llama.cpp": "llama.cpp", "vllm": "vLLM", "sglang": "SGLang",
}  # fmt: skip
Verdict = Literal[
    "agrees", "works", "falls back", "slower", "needs a flag", "doubtful", "not examined", "differs", "refuses",
    "not supported",
]  # fmt: skip
FAILURES = ("refuses", "not supported", "differs")
SLOWDOWNS = ("slower", "doubtful", *FAILURES)  # on some kind of machine
SUCCESSES = ("agrees", "works")
CHECKS = {"run": "seen in a run", "read": "read in its source"}
TIME_STEP_MIN = 1e-3  # where a config does not set it


class ServedModel(Value):
    """What rules depend on: the type, key and value dim, key heads (groups, in Mamba-2) and config of a model."""

    model_type: str
    key_dim: int
    value_dim: int
    heads: int
    config: Config

    @classmethod
    def at_dims(cls, config: Config, key_dim: int | None = None, value_dim: int | None = None) -> "ServedModel":
        """Return the model of a config at these dims; default: its own."""
        mixer = described_mixers(config)[0]
        return cls(
            model_type=str(config["model_type"]), key_dim=mixer.axis.width if key_dim is None else key_dim,
            value_dim=mixer.value_dim if value_dim is None else value_dim, heads=mixer.axis.heads, config=config,
        )  # fmt: skip

    @property
    def time_step_min(self) -> float:
        value = self.config.get("time_step_min")
        return float(value) if isinstance(value, (int, float)) else TIME_STEP_MIN


KEY_DIM_CONDITIONS: Mapping[str, Callable[[ServedModel], bool]] = {
    "always": lambda model: True,
    "not 128": lambda model: model.key_dim != 128,
    "or value dim not 128": lambda model: (model.key_dim, model.value_dim) != (128, 128),
    "not 96, 128 or 256": lambda model: model.key_dim not in (96, 128, 256),
    "not a power of two": lambda model: model.key_dim & (model.key_dim - 1) != 0,
    "not a multiple of 16": lambda model: model.key_dim % 16 != 0,
    "not a multiple of 32": lambda model: model.key_dim % 32 != 0,
    "not the value dim": lambda model: model.key_dim != model.value_dim,
    "equal to the value dim": lambda model: model.key_dim == model.value_dim,
}
# conditions that hold for every cut alike
ALL_CUTS = ("always", "not 128", "or value dim not 128", "not the value dim", "equal to the value dim")
CONFIG_CONDITIONS: Mapping[str, Callable[[ServedModel], bool]] = {
    "one group": lambda model: model.heads == 1,
    "several groups": lambda model: model.heads > 1,
    "time_step_min above 1e-6": lambda model: model.time_step_min > 1e-6,
    "time_step_min up to 1e-6": lambda model: model.time_step_min <= 1e-6,
}


class Rule(Value):
    """What an engine does with models of some types; `when`, `model` and `where` limit key dim, config and machine."""

    engine: str
    version: str
    model_types: tuple[str, ...]
    when: str
    model: str | None
    where: str | None
    verdict: Verdict
    what: str
    advice: str | None
    checked: Literal["run", "read"]
    source: str

    def concerns(self, model: ServedModel) -> bool:
        """Return whether the rule is about such a model, at some key dim."""
        return model.model_type in self.model_types and (self.model is None or CONFIG_CONDITIONS[self.model](model))

    def applies(self, model: ServedModel) -> bool:
        return self.concerns(model) and KEY_DIM_CONDITIONS[self.when](model)

    @property
    def is_failure(self) -> bool:
        """Whether a model cannot be served at all, on any machine."""
        return self.verdict in FAILURES and self.where is None

    @property
    def is_unsafe(self) -> bool:
        """Whether the results may be wrong, of every cut or at these key dims alone."""
        is_doubtful = self.verdict == "doubtful" and self.when not in ALL_CUTS
        return self.is_failure or is_doubtful or self.verdict == "not examined"

    @property
    def is_slow(self) -> bool:
        """Whether other cuts run faster on some machine."""
        return self.when not in ALL_CUTS and self.verdict in SLOWDOWNS

    @property
    def condition(self) -> str:
        """Key dims and configs that the rule is limited to; empty where it covers all models of its types."""
        key_dims = "" if self.when == "always" else f"key dim {self.when}"
        return ", ".join(filter(None, (key_dims, self.model)))

    def describe(self, *, condition: bool = False) -> str:
        """Return the rule as one line; with its condition where no key dim is known."""
        about = f", {self.condition}" if condition and self.condition else ""
        machine = f" {self.where}" if self.where else ""
        advice = "" if self.advice is None else f": {self.advice}"
        title = f"{TITLES[self.engine]} {self.version}{machine}{about}"
        return f"{title}: {self.verdict}; {self.what}{advice} ({CHECKS[self.checked]})"


class RuleBook(Value):
    """All rules, and the date when the engines were last examined."""

    date: str
    rules: tuple[Rule, ...]


@functools.cache
def rule_book() -> RuleBook:
    """Read the rules of the package; in the file each names a group of model types."""
    text = resources.files("slimstate.serving").joinpath("engine_rules.json").read_text(encoding="utf-8")
    data = json.loads(text)
    entries = [{**entry, "model_types": data["groups"][entry["group"]]} for entry in data["rules"]]
    return from_json(RuleBook, {**data, "rules": entries})


def rules_of(model_type: str, engine: str | None = None) -> tuple[Rule, ...]:
    """Return all rules about a model type, in one engine or in all."""
    return tuple(rule for rule in rule_book().rules if model_type in rule.model_types and engine in (None, rule.engine))


def rules_for(model: ServedModel, engine: str | None = None) -> tuple[Rule, ...]:
    """Return the rules that apply to a model at its key dim."""
    return tuple(rule for rule in rules_of(model.model_type, engine) if rule.applies(model))


def describe_serving(config: Config, engine: str | None, candidates: Iterable[int] = ()) -> Serving:
    """Return the rules about a model and a verdict for each engine; of one engine also the safe and fast key dims.

    Key dims are safe where the engine was seen to serve them, and fast where no machine is known to be slower.
    """
    model, candidates = ServedModel.at_dims(config), tuple(candidates)
    rules = [rule for rule in rules_of(model.model_type, engine) if rule.concerns(model)]
    dims = {name: _key_dims(config, name, candidates) for name in TITLES if any(rule.engine == name for rule in rules)}
    verdicts = tuple(line for _, _, line in dims.values())
    if not dims:
        was = "no engine was" if engine is None else f"{TITLES[engine]} was not"
        verdicts = (f"{was} examined with {model.model_type}",)
    safe, fast, _ = (None, None, None) if engine is None else dims.get(engine, ((), (), None))
    facts: dict[str, Any] = {"rules": tuple(map(vars, rules)), "safe": safe, "fast": fast, "verdicts": verdicts}
    return Serving(date=rule_book().date, engine=engine, **facts)


def _key_dims(config: Config, engine: str, candidates: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Return the safe and the fast ones of some key dims, and a line about them."""
    equal = {key_dim for key_dim in candidates if needs_equal_dims(config, engine, key_dim)}
    impossible = {key_dim for key_dim in equal if key_dim > ServedModel.at_dims(config).value_dim}
    dims = {each: (each, each if each in equal else None) for each in candidates if each not in impossible}
    rules = {key_dim: rules_for(ServedModel.at_dims(config, *each), engine) for key_dim, each in dims.items()}
    safe = tuple(key_dim for key_dim, some in rules.items() if _is_safe(some))
    fast = tuple(key_dim for key_dim in safe if not any(rule.is_slow for rule in rules[key_dim]))
    every = [rule for some in rules.values() for rule in some]
    if not safe:
        reason = next((rule.describe() for rule in every if rule.is_unsafe and rule.verdict != "doubtful"), None)
        return safe, fast, reason or f"{TITLES[engine]}: no key dim below the model's own was seen to work"
    line = f"{TITLES[engine]}: safe key dim{'s' * (len(safe) > 1)} {', '.join(map(str, safe))}"
    if equal & {*safe}:
        line += ", with as many values (`state_dim`)"
    if fast != safe:
        line += f"; at full speed on every kind of machine: {', '.join(map(str, fast)) or 'none of them'}"
    flags = dict.fromkeys(f"; {rule.where}: {rule.advice}" for rule in every if rule.verdict == "needs a flag")
    return safe, fast, line + "".join(flags)


def _is_safe(rules: tuple[Rule, ...]) -> bool:
    return any(rule.verdict in SUCCESSES for rule in rules) and not any(rule.is_unsafe for rule in rules)


def warning(model: ServedModel, engine: str | None = None) -> str | None:
    """Return a warning where the engine, or without one every engine that has rules, cannot serve the model."""
    names = [engine] if engine is not None else [name for name in TITLES if name != "transformers"]
    engines = [name for name in names if rules_of(model.model_type, name)]
    failures = [next((rule for rule in rules_for(model, name) if rule.is_failure), None) for name in engines]
    lines = [rule.describe() for rule in failures if rule is not None]
    if not engines or len(lines) < len(engines):
        return None
    title = TITLES[engines[0]] if len(engines) == 1 else "every engine that was examined"
    reasons = "; ".join(lines)
    return f"warning: at key dim {model.key_dim} {title} refuses the model or computes something else: {reasons}"


def needs_equal_dims(config: Config, engine: str | None, key_dim: int) -> bool:
    """Return whether an engine serves a cut to this key dim only if as many values are kept."""
    if engine is None:
        return False
    apart, equal = (
        any(rule.is_failure for rule in rules_for(ServedModel.at_dims(config, key_dim, value_dim), engine))
        for value_dim in (None, key_dim)
    )
    return apart and not equal


def cut_advice(
    config: Config, dims: tuple[int, int | None], engine: str | None, candidates: Iterable[int]
) -> tuple[list[str], list[str]]:
    """Return lines to show before a cut: a warning where it cannot be served, an engine's verdict; and its rules."""
    model = ServedModel.at_dims(config, *dims)
    lines = [] if (problem := warning(model, engine)) is None else [problem]
    if engine is None:
        return lines, []
    candidates = sorted({dims[0], *candidates} - {ServedModel.at_dims(config).key_dim}, reverse=True)
    rules = [rule.describe() for rule in rules_for(model, engine) if not rule.is_failure]
    verdicts = describe_serving(config, engine, candidates).verdicts
    return [*lines, *(line for line in verdicts if line not in (problem or ""))], rules


def serving_lines(config: Config) -> str:
    """Return the section of a model card about engines, with a warning if none can serve the cut; empty if uncut."""
    from slimstate.checkpoints.model_card import render

    if (config.get("slimstate") or {}).get("key_dim") is None:
        return ""
    model = ServedModel.at_dims(config)
    rules, line = rules_for(model), warning(model)
    return render("serving.md", date=rule_book().date, rules=rules, warning=line) if rules or line else ""
