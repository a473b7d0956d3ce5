"""Write the page of what is supported, from the registry of families, the serving rules and measured exactness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slimstate.families import FAMILIES, Family
from slimstate.families.refused import REFUSED
from slimstate.serving.engines import date, rules_of

ENGINES = ("mlx", "llama.cpp", "vllm", "sglang")
HEAD = """# What is supported

Rendered by `python docs/render.py` from the registry of families, the engine rules and records/exactness.json. The
columns *half*, *third* and *rescaled* show how exact a cut is: the largest difference in any logit, in standard
deviations of the logits, between a tiny random model after the cut and the uncut model with the same channels zeroed
(float32 on a CPU). *half* and *third* are cuts by `prune` from key dim 24 to 12 and 8. *rescaled* is a cut to 8 that
keeps the norm's epsilon, compared with zeroing *and* the query scale of the new key dim; so are the other columns where
nothing makes up for the scale. 0 means equal to the last bit, with the scan of transformers; our chunked scan, which
replaces it on a CPU, differs by up to 2e-05. The columns of engines are as of {date}: `slimstate inspect MODEL` shows
each rule with its evidence, `slimstate verify DIR` runs an engine, and [serving](serving/README.md) has the details.

| model type | class of | what is cut | query scale | half | third | rescaled | mlx-lm | llama.cpp | vLLM | SGLang |
|---|---|---|---|---|---|---|---|---|---|---|
"""
REFUSALS = """
## What is refused

| model type | why |
|---|---|
"""
QUANTIZED = (
    "any with `quantization_config` (FP8, GPTQ, AWQ, ...)",
    "rows cannot be cut out of quantised blocks: cut the unquantised model and quantise the result",
)


def support_table(exactness: Mapping[str, Mapping[str, float]]) -> str:
    """Return the page; `exactness` has the differences of two cuts and of a rescaled one by model type.

    Families that were not measured are left out.
    """
    rows = [_row(family, exactness[name]) for name, family in FAMILIES.items() if name in exactness]
    refusals = [f"| {which} | {reason} |" for which, reason in (*_refusals(), QUANTIZED)]
    return HEAD.format(date=date()) + "\n".join(rows) + "\n" + REFUSALS + "\n".join(refusals) + "\n"


def _refusals() -> Iterator[tuple[str, str]]:
    """Yield the model types, and the configs of a family, that cannot be cut, and why."""
    yield from ((f"`{name}`", reason) for name, reason in sorted(REFUSED.items()))
    for name, family in FAMILIES.items():
        yield from ((f"`{name}` with {which}", reason) for which, reason in family.refused.items())


def _row(family: Family, differences: Mapping[str, float]) -> str:
    slots = family.mixers(family.stock_config)[0].axis.slots
    parameters = ", ".join(f"`{name}`" for name in dict.fromkeys(slot.parameter for slot in slots))
    engines = (_verdicts(family.model_type, engine) for engine in ENGINES)
    numbers = (f"{differences[kind]:.0e}" if differences[kind] else "0" for kind in ("half", "third", "rescaled"))
    scale = _query_scale(family)
    return f"| {' | '.join([f'`{family.model_type}`', family.library, parameters, scale, *numbers, *engines])} |"


def _query_scale(family: Family) -> str:
    correction = family.correction(family.stock_config)
    if correction.epsilon is not None:
        return f"`{correction.epsilon}` makes up for it"
    return "folded into the query weights" if correction.folded else correction.why.partition(":")[0]


def _verdicts(model_type: str, engine: str) -> str:
    parts = []
    for rule in rules_of(model_type, engine):
        condition = ", ".join(filter(None, (rule.where, rule.condition)))
        parts.append(f"{condition}: {rule.verdict}" if condition else rule.verdict)
    return "; ".join(parts) or "not examined"
