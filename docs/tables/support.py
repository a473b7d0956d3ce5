"""SUPPORT.md: every family with its measured exactness, and what engines do with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slimstate.checkpoints.formats import FORMATS
from slimstate.families import FAMILIES, Family
from slimstate.families.refused import REFUSED
from slimstate.serving.engines import rule_book, rules_of
from tables.layout import power, record, table

ENGINES = {"mlx": "mlx-lm", "llama.cpp": "llama.cpp", "vllm": "vLLM", "sglang": "SGLang"}
CUTS = ("half", "third", "rescaled", "values", "both")
QUANTIZED = {
    "type": "linear attention quantised in other formats (bitsandbytes, HQQ, GGUF, ...)",
    "why": f"rows can be cut out of {', '.join(FORMATS)}: cut the unquantised model and quantise the result",
}


def _support(family: Family) -> dict[str, Any]:
    """Return the row of a family."""
    mixer, cuts_keys = family.mixers(family.stock_config)[0], "half" in record("exactness")[family.model_type]
    slots = mixer.axis.slots if cuts_keys or mixer.value_axis is None else mixer.value_axis.slots
    return {
        "type": family.model_type,
        "library": family.library,
        "parameters": ", ".join(f"`{name}`" for name in dict.fromkeys(slot.parameter for slot in slots)),
        "scale": _query_scale(family) if cuts_keys else "keys are not cut",
        **{cut: _exactness(family.model_type, cut) for cut in CUTS},
        "engines": [_verdicts(family.model_type, engine) for engine in ENGINES],
    }


def _exactness(model_type: str, cut: str) -> str:
    value = record("exactness")[model_type].get(cut)
    return "–" if value is None else power(value)


def _query_scale(family: Family) -> str:
    correction = family.correction(family.stock_config)
    if correction.epsilon is not None:
        return f"`{correction.epsilon}` compensates"
    return "folded into the query weights" if correction.folded else correction.why.partition(":")[0]


def _verdicts(model_type: str, engine: str) -> str:
    parts = []
    for rule in rules_of(model_type, engine):
        condition = ", ".join(filter(None, (rule.where, rule.condition)))
        parts.append(f"{condition}: {rule.verdict}" if condition else rule.verdict)
    return "; ".join(parts) or "not examined"


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
            "what is cut": "{parameters}",
            "query scale": "{scale}",
            **{cut: f"{{{cut}}}" for cut in CUTS},
            **{title: f"{{engines[{number}]}}" for number, title in enumerate(ENGINES.values())},
        },
        [_support(family) for name, family in FAMILIES.items() if name in record("exactness")],
    ),
    "refused": table({"model type": "{type}", "why": "{why}"}, _refusals()),
}
NUMBERS = {"rules-date": rule_book().date}
