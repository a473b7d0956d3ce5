"""What serving engines make of a cut model: rules by family and key dim, each with the source it was read in.

The rules are data, `engine_rules.json`, with the date and the versions of the engines they are of.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources

from slimstate.records.schema import read

WHEN: dict[str, Callable[[int], bool]] = {
    "always": lambda key_dim: True,
    "not 128": lambda key_dim: key_dim != 128,
    "not a power of two": lambda key_dim: key_dim & (key_dim - 1) != 0,
    "not a multiple of 32": lambda key_dim: key_dim % 32 != 0,
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What an engine does with models of some families whose key dim is such (`when`)."""

    engine: str
    model_types: tuple[str, ...]
    when: str
    verdict: str
    what: str
    advice: str | None
    source: str
    checked: str

    def applies(self, model_type: str, key_dim: int) -> bool:
        return model_type in self.model_types and WHEN[self.when](key_dim)

    def describe(self, *, condition: bool = False) -> str:
        """The rule in a line; with its condition where no key dim is at hand."""
        about = f" if the key dim is {self.when}" if condition and self.when != "always" else ""
        way_out = "" if self.advice is None else f": {self.advice}"
        return f"{self.engine}{about}: {self.verdict}; {self.what}{way_out} ({self.checked})"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found, when, and in which versions of the engines."""

    date: str
    versions: Mapping[str, str]
    rules: tuple[Rule, ...]


@functools.cache
def findings() -> Findings:
    """What the package holds; in the file a rule names a group of model types, and the groups stand apart."""
    text = resources.files("slimstate.serving").joinpath("engine_rules.json").read_text(encoding="utf-8")
    data = json.loads(text)
    entries = [{**entry, "model_types": data["groups"][entry["group"]]} for entry in data["rules"]]
    return read(Findings, {**data, "rules": entries})


def rules() -> tuple[Rule, ...]:
    return findings().rules


def date() -> str:
    """When the engines were looked at."""
    return findings().date


def rules_of(model_type: str) -> tuple[Rule, ...]:
    """All that is known about a family."""
    return tuple(rule for rule in rules() if model_type in rule.model_types)


def advice(model_type: str, key_dim: int) -> tuple[Rule, ...]:
    """What is known about a family at a key dim."""
    return tuple(rule for rule in rules() if rule.applies(model_type, key_dim))
