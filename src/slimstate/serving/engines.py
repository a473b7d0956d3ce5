"""What serving engines make of a cut model: rules by family and key dim, each with how it is known.

The rules are data, `engine_rules.json`. A rule was *run*, and names the command, or *read*, and names the source.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from slimstate.checkpoints.reader import described_mixers
from slimstate.families.contract import Config
from slimstate.records.schema import from_json
from slimstate.system.errors import PlanError, quoted

TITLES: Mapping[str, str] = {
    "transformers": "transformers", "mlx": "mlx-lm", "llama.cpp": "llama.cpp", "vllm": "vLLM", "sglang": "SGLang",
}  # fmt: skip
Verdict = Literal[
    "agrees", "works", "falls back", "slower", "needs a flag", "doubtful", "not examined", "differs", "refuses",
    "not there",
]  # fmt: skip
STOPS = ("refuses", "not there", "differs")  # what a model cannot be served with


@dataclass(frozen=True, kw_only=True)
class Served:
    """What rules ask of a model: its type, key and value dim, its key heads (groups, in Mamba-2), its config."""

    model_type: str
    key_dim: int
    value_dim: int
    heads: int
    config: Config

    @classmethod
    def of(cls, config: Config, key_dim: int | None = None) -> Served:
        """A model of this config, or one that is cut to a key dim."""
        first = described_mixers(config)[0]
        return cls(
            model_type=str(config["model_type"]), key_dim=first.axis.width if key_dim is None else key_dim,
            value_dim=first.value_dim, heads=first.axis.heads, config=config,
        )  # fmt: skip


WHEN: Mapping[str, Callable[[Served], bool]] = {
    "always": lambda served: True,
    "not 128": lambda served: served.key_dim != 128,
    "not 96, 128 or 256": lambda served: served.key_dim not in (96, 128, 256),
    "not a power of two": lambda served: served.key_dim & (served.key_dim - 1) != 0,
    "not a multiple of 32": lambda served: served.key_dim % 32 != 0,
    "not the value dim": lambda served: served.key_dim != served.value_dim,
}
TIME_STEP_MIN = 1e-3  # where a config says nothing
MODELS: Mapping[str, Callable[[Served], bool]] = {
    "one group": lambda served: served.heads == 1,
    "several groups": lambda served: served.heads > 1,
    "time_step_min above 1e-6": lambda served: _time_step_min(served) > 1e-6,
    "time_step_min up to 1e-6": lambda served: _time_step_min(served) <= 1e-6,
}


def _time_step_min(served: Served) -> float:
    given = served.config.get("time_step_min")
    return float(given) if isinstance(given, (int, float)) else TIME_STEP_MIN


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What an engine does with models of some families whose key dim is such (`when`).

    It may be about those alone whose config is such (`model`), or about a kind of machine alone (`where`).
    """

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

    def applies(self, served: Served) -> bool:
        fits = self.model is None or MODELS[self.model](served)
        return served.model_type in self.model_types and fits and WHEN[self.when](served)

    @property
    def stops(self) -> bool:
        """Whether a model cannot be served there at all, on whatever machine."""
        return self.verdict in STOPS and self.where is None

    @property
    def condition(self) -> str:
        """What it depends on, in words; empty where it is about all models of its families."""
        parts = ([] if self.when == "always" else [f"key dim {self.when}"]) + ([self.model] if self.model else [])
        return ", ".join(parts)

    def describe(self, *, condition: bool = False) -> str:
        """The rule in a line; with its condition where no key dim is at hand."""
        about = f", {self.condition}" if condition and self.condition else ""
        place = f" {self.where}" if self.where else ""
        way_out = "" if self.advice is None else f": {self.advice}"
        return (
            f"{TITLES[self.engine]} {self.version}{place}{about}: {self.verdict}; {self.what}{way_out} ({self.checked})"
        )


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found, and when."""

    date: str
    rules: tuple[Rule, ...]


@functools.cache
def findings() -> Findings:
    """What the package holds; in the file a rule names a group of model types, and the groups stand apart."""
    text = resources.files("slimstate.serving").joinpath("engine_rules.json").read_text(encoding="utf-8")
    data = json.loads(text)
    entries = [{**entry, "model_types": data["groups"][entry["group"]]} for entry in data["rules"]]
    return from_json(Findings, {**data, "rules": entries})


def rules() -> tuple[Rule, ...]:
    return findings().rules


def date() -> str:
    """When the engines were looked at last."""
    return findings().date


def rules_of(model_type: str, engine: str | None = None) -> tuple[Rule, ...]:
    """All that is known about a family, in all engines or in one."""
    return tuple(rule for rule in rules() if model_type in rule.model_types and engine in (None, rule.engine))


def advice(served: Served, engine: str | None = None) -> tuple[Rule, ...]:
    """What is known about a model at its key dim."""
    return tuple(rule for rule in rules_of(served.model_type, engine) if rule.applies(served))


@dataclass(frozen=True, kw_only=True)
class KeyDims:
    """Key dims for an engine: those that nothing stands in the way of, and of these the ones that run at full speed."""

    safe: tuple[int, ...]
    fast: tuple[int, ...]

    def describe(self, engine: str) -> str:
        if not self.safe:
            return f"{TITLES[engine]}: no key dim below the model's own is known to be safe there"
        listed = ", ".join(map(str, self.safe))
        if self.fast == self.safe:
            return f"{TITLES[engine]}: safe key dims {listed}"
        fast = ", ".join(map(str, self.fast)) or "none of them"
        return f"{TITLES[engine]}: safe key dims {listed}; at full speed on every kind of machine: {fast}"


def key_dims_for(engine: str, config: Config, candidates: Iterable[int]) -> KeyDims:
    """Which of some key dims are safe and fast in an engine, as far as rules tell; unknown families have none."""
    check_engine(engine)
    found = {key_dim: advice(Served.of(config, key_dim), engine) for key_dim in candidates}
    safe = [
        key_dim
        for key_dim, known in found.items()
        if known and not any(rule.stops or rule.verdict == "not examined" for rule in known)
    ]
    slowed = ("slower", *STOPS, "doubtful")  # on some kind of machine
    fast = [
        key_dim for key_dim in safe if not any(_by_width(rule) and rule.verdict in slowed for rule in found[key_dim])
    ]
    return KeyDims(safe=tuple(safe), fast=tuple(fast))


def _by_width(rule: Rule) -> bool:
    """Whether another cut would fare better: not so where every cut is alike."""
    return rule.when not in ("always", "not 128", "not the value dim")


def warning(served: Served, engine: str | None = None) -> str | None:
    """Why a model cannot be served, where that is so in the engine, or in every engine of which something is known."""
    if engine is not None:
        check_engine(engine)
    asked = (engine,) if engine is not None else tuple(name for name in TITLES if name != "transformers")
    stopped = {name: [rule for rule in advice(served, name) if rule.stops] for name in asked}
    known = [name for name in asked if rules_of(served.model_type, name)]
    if not known or not all(stopped[name] for name in known):
        return None
    lines = "; ".join(rule.describe() for name in known for rule in stopped[name][:1])
    who = TITLES[known[0]] if len(known) == 1 else "every engine that is known"
    return f"warning: at key dim {served.key_dim} {who} refuses the model or computes something else: {lines}"


def check_engine(engine: str) -> None:
    if engine not in TITLES:
        raise PlanError(f"unknown engine {quoted(engine)}; there are {', '.join(TITLES)}")
