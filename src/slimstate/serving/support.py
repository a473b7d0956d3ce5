"""The table of what is supported, made from the registry of families, the serving rules and measured exactness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slimstate.families import FAMILIES, Family
from slimstate.families.refused import REFUSED
from slimstate.serving.engines import Rule, date, rules_of

ENGINES = ("mlx", "llama.cpp", "vllm", "sglang")
HEAD = """# What is supported

Made by `python benchmarks/exactness.py` from the registry of families; a test keeps it true. The columns *half*,
*third* and *rescaled* are the largest difference in any logit, in standard deviations of the logits, between a tiny
random model that was cut and the uncut one with the same channels zeroed (float32 on a CPU): *half* and *third* as
`prune` cuts key dim 24 to 12 and 8, *rescaled* to 8 with the norm's epsilon kept, against zeroing *and* the query scale
of the new key dim; so are the others where the scale cannot be made up for. 0 is equality to the last bit, with
the scan of transformers; by chunks of ours, which run on a CPU in its place, it is up to 2e-05. What engines do, as
of {date}: `slimstate inspect MODEL` shows each rule with how it is known, `slimstate verify DIR` asks an engine, and
the pages in [serving](serving/README.md) say more.

| model type | class of | what is cut | query scale | half | third | rescaled | mlx-lm | llama.cpp | vLLM | SGLang |
|---|---|---|---|---|---|---|---|---|---|---|
"""
REFUSALS = """
## What is refused

| model type | why |
|---|---|
"""


def support_table(exactness: Mapping[str, Mapping[str, float]]) -> str:
    """The page; `exactness` has the differences of two cuts and of a rescaled one by model type.

    A family is on it as soon as it was measured.
    """
    rows = [_row(family, exactness[name]) for name, family in FAMILIES.items() if name in exactness]
    refused = [f"| {which} | {reason} |" for which, reason in _refused()]
    refused += [
        "| any with `quantization_config` (FP8, GPTQ, AWQ, ...) | rows cannot be cut out of quantised blocks: cut the"
        " unquantised model and quantise the result |",
    ]
    return HEAD.format(date=date()) + "\n".join(rows) + "\n" + REFUSALS + "\n".join(refused) + "\n"


def _refused() -> Iterator[tuple[str, str]]:
    """Which model types, and which configs of a family, cannot be cut, and why."""
    yield from ((f"`{name}`", reason) for name, reason in sorted(REFUSED.items()))
    for name, family in FAMILIES.items():
        yield from ((f"`{name}` with {which}", reason) for which, reason in family.refused.items())


def _row(family: Family, measured: Mapping[str, float]) -> str:
    slots = family.mixers(family.stock_config)[0].axis.slots
    parameters = ", ".join(f"`{name}`" for name in dict.fromkeys(slot.parameter for slot in slots))
    engines = (_verdicts(family.model_type, engine) for engine in ENGINES)
    numbers = (f"{measured[kind]:.0e}" if measured[kind] else "0" for kind in ("half", "third", "rescaled"))
    words = _scale_words(family)
    return f"| {' | '.join([f'`{family.model_type}`', family.library, parameters, words, *numbers, *engines])} |"


def _scale_words(family: Family) -> str:
    correction = family.correction(family.stock_config)
    if correction.epsilon is not None:
        return f"`{correction.epsilon}` makes up for it"
    if correction.folded:
        return "folded into the query weights"
    return correction.why.partition(":")[0]


def _verdicts(model_type: str, engine: str) -> str:
    found = rules_of(model_type, engine)
    if not found:
        return "not examined"
    return "; ".join(_brief(rule) for rule in found)


def _brief(rule: Rule) -> str:
    about = ", ".join(part for part in (rule.where, rule.condition) if part)
    return f"{about}: {rule.verdict}" if about else rule.verdict
