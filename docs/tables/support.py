"""SUPPORT.md: what engines do with every family, and how exact its cuts are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from slimstate.checkpoints.formats import FORMATS
from slimstate.families import FAMILIES, Family
from slimstate.families.refused import REFUSED
from slimstate.serving.engines import CHECKS, Rule, rule_book
from tables.layout import markdown, power, record, table

ENGINES = ("mlx", "llama.cpp", "vllm", "sglang")
MEASURED = {name: family for name, family in FAMILIES.items() if name in record("exactness")}
CUTS = ("half", "third", "rescaled", "values", "both")
QUANTIZED = {
    "type": "linear attention quantised in other formats (bitsandbytes, HQQ, GGUF, ...)",
    "why": f"rows can be cut out of {', '.join(FORMATS)}: cut the unquantised model and quantise the result",
}


def _support(family: Family) -> dict[str, Any]:
    """Return the row of a family."""
    return {
        "type": family.model_type,
        "library": family.library,
        "scale": _query_scale(family) if _cuts_keys(family) else "keys stay",
        **{cut: _exactness(family.model_type, cut) for cut in CUTS},
    }


def _cuts_keys(family: Family) -> bool:
    return "half" in record("exactness")[family.model_type]


def _parameters() -> Iterator[dict[str, str]]:
    """Yield the parameters that a cut makes smaller, with the model types that have them."""
    types: dict[str, list[str]] = {}
    for name, family in MEASURED.items():
        mixer = family.mixers(family.stock_config)[0]
        slots = mixer.axis.slots if _cuts_keys(family) or mixer.value_axis is None else mixer.value_axis.slots
        types.setdefault(_codes(dict.fromkeys(slot.parameter for slot in slots)), []).append(name)
    yield from ({"parameters": parameters, "types": _codes(names)} for parameters, names in types.items())


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _exactness(model_type: str, cut: str) -> str:
    value = record("exactness")[model_type].get(cut)
    return "–" if value is None else power(value)


def _query_scale(family: Family) -> str:
    correction = family.correction(family.stock_config)
    if correction.epsilon is not None:
        return f"`{correction.epsilon}`"
    if correction.folded:
        return "query weights"
    return "not scaled" if "do not scale" in correction.why else "nothing"


def _rules(engine: str) -> str:
    """Return a table with a line for each rule of an engine; those of the same models follow each other."""
    rules = sorted((rule for rule in rule_book().rules if rule.engine == engine), key=lambda rule: rule.model_types)
    lines = []
    for types, group in itertools.groupby(rules, key=lambda rule: _codes(rule.model_types)):
        lines += [[types * (number == 0), *_cells(rule)] for number, rule in enumerate(group)]
    others = ["all others", "", "**not examined**", ""]
    return markdown(["model types", "where", "verdict", "what happens"], [*lines, others])


def _cells(rule: Rule) -> list[str]:
    advice = f": {rule.advice}" if rule.advice else ""
    where = ", ".join(filter(None, (rule.where, rule.condition)))
    return [where, f"**{rule.verdict}**", f"{rule.what}{advice} ({CHECKS[rule.checked]})"]


def _refusals() -> Iterator[dict[str, str]]:
    """Yield the model types, and the configs of a family, that cannot be cut, and why."""
    yield from ({"type": f"`{name}`", "why": why} for name, why in sorted(REFUSED.items()))
    for name, family in FAMILIES.items():
        yield from ({"type": f"`{name}` with {which}", "why": why} for which, why in family.refused.items())
        if (why := family.value_refusal(family.stock_config)) is not None:
            yield {"type": f"values of `{name}`", "why": why}
        if not family.refused and (why := family.key_refusal(family.stock_config)) is not None:
            yield {"type": f"keys of `{name}`", "why": why}
    yield QUANTIZED


TABLES = {
    "support": table(
        {
            "model type": "`{type}`",
            "class of": "{library}",
            "scale corrected by": "{scale}",
            **{cut: f"{{{cut}}}" for cut in CUTS},
        },
        map(_support, MEASURED.values()),
    ),
    "support-parameters": table({"what is cut": "{parameters}", "of": "{types}"}, _parameters()),
    **{f"support-{engine.replace('.', '-')}": _rules(engine) for engine in ENGINES},
    "refused": table({"model type": "{type}", "why": "{why}"}, _refusals()),
}
NUMBERS = {"rules-date": rule_book().date}
