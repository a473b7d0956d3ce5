"""What a record must hold to be drawn. One that does not is named and left out, with the first thing it lacks.

A shape is one of the constants below, a dict of fields, a list of one shape (a list of at least one such item),
`Maybe` or `Each`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slimstate.records.folder import Found

Data = Mapping[str, Any]
NUMBER, POSITIVE, COUNT, TEXT, TRUTH = "a number", "a positive number", "a count", "text", "true or false"
WHOLE = "a whole number above zero"
LIMIT = 1e300  # beyond it arithmetic overflows; also what tells NaN and infinities


@dataclass(frozen=True)
class Maybe:
    """Of this shape, empty, or not there."""

    shape: Any


@dataclass(frozen=True)
class Each:
    """An object whose fields have any names, at least one, and this shape."""

    shape: Any


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LIMIT < value < LIMIT


def is_text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


TESTS: dict[str, Callable[[Any], bool]] = {
    NUMBER: is_number,
    POSITIVE: lambda value: is_number(value) and value > 0,
    COUNT: lambda value: isinstance(value, int) and is_number(value) and value >= 0,
    WHOLE: lambda value: isinstance(value, int) and is_number(value) and value > 0,
    TEXT: is_text,
    TRUTH: lambda value: isinstance(value, bool),
}


def empty(shape: Any) -> Any:
    """The empty value of a shape that has one."""
    return [] if isinstance(shape, list) else {} if isinstance(shape, (dict, Each)) else None


def misfit(value: Any, shape: Any, place: str = "") -> str | None:
    """The first place where the value is not of the shape, in words; None where it is."""
    if isinstance(shape, Maybe):
        return None if value is None or value == empty(shape.shape) else misfit(value, shape.shape, place)
    if value is None:
        return f"{place} is missing"
    inner: list[tuple[str, Any, Any]]
    if isinstance(shape, str):
        return None if TESTS[shape](value) else f"{place} is not {shape}"
    if isinstance(shape, list):
        if not isinstance(value, list) or not value:
            return f"{place} is not a list with something in it"
        inner = [(f"{place}[{number}]", item, shape[0]) for number, item in enumerate(value)]
    elif not isinstance(value, dict) or not value:
        return f"{place or 'it'} is not an object with something in it"
    elif isinstance(shape, Each):
        inner = [(f"{place}.{name}", item, shape.shape) for name, item in value.items()]
    else:
        inner = [(f"{place}.{name}".lstrip("."), value.get(name), part) for name, part in shape.items()]
    return next((words for part in inner if (words := misfit(part[1], part[2], part[0]))), None)


WINDOWS = {"data": Maybe(TEXT), "samples": Maybe(COUNT), "length": Maybe(COUNT), "digest": Maybe(TEXT)}
ORIGIN = {"command": Maybe(TEXT), "versions": Maybe(Each(TEXT)), "kernels": Maybe(TEXT), "seed": Maybe(NUMBER)}
LOADER = Maybe({"library": TEXT, "class": TEXT})
CUT = {"method": TEXT, "key_dim": WHOLE, "width": WHOLE, "base_model": Maybe(TEXT), "base_fingerprint": Maybe(TEXT)}
MODEL = {
    "name": TEXT, "model": TEXT, "fingerprint": Maybe(TEXT), "model_type": Maybe(TEXT), "key_dim": Maybe(COUNT),
    "cut": Maybe(CUT), "loader": LOADER,
}  # fmt: skip
ROW = {
    "method": TEXT, "score": TEXT, "compression": NUMBER, "key_dim": COUNT, "state_bytes": POSITIVE,
    "perplexity": Maybe(POSITIVE), "nats_over_uncut": Maybe(NUMBER), "rank_utilisation": Maybe(NUMBER),
    "kappa": Maybe(NUMBER), "kappa_worst": Maybe(NUMBER),
}  # fmt: skip
SWEEP = {
    **ORIGIN,
    "model": TEXT,
    "loader": LOADER,
    "width": WHOLE,
    "settings": Maybe({"fingerprint": Maybe(TEXT), "calibration": Maybe(WINDOWS), "text": Maybe(WINDOWS)}),
    "uncut": {"key_dim": COUNT, "state_bytes": POSITIVE, "perplexity": POSITIVE, "rank_utilisation": NUMBER},
    "rows": [ROW],
    "recommended": Maybe(
        {"row": Maybe(COUNT), "within": Maybe(TRUTH), "reason": Maybe(TEXT), "command": Maybe(TEXT)},
    ),
}
TRACE = {
    **MODEL,
    **ORIGIN,
    "text": Maybe(WINDOWS),
    "capacity": POSITIVE,
    "layers": [COUNT],
    "heads": WHOLE,
    "times": [NUMBER],
    "curve": [NUMBER],
    "utilisation_by_head": [[NUMBER]],
    "kappa_by_head": [[Maybe(NUMBER)]],
    "histogram": {"low": NUMBER, "high": NUMBER, "counts": [[[COUNT]]]},
    "spectrum": [[[NUMBER]]],
    "bounds": {
        "states": COUNT,
        "violations": COUNT,
        "effective_rank": Maybe([NUMBER]),
        "amplification": Maybe([Maybe(NUMBER)]),
        "amplification_lower": Maybe([Maybe(NUMBER)]),
        "amplification_upper": Maybe([Maybe(NUMBER)]),
    },
}
FILTERS = {
    **MODEL,
    **ORIGIN,
    "text": Maybe(WINDOWS),
    "filters": Each(Each([[[NUMBER]]])),
    "likeness": Maybe(Each(Each([NUMBER]))),
}
RESULT = {
    **MODEL,
    "text": Maybe(TEXT),
    "digest": Maybe(TEXT),
    "kernels": Maybe(TEXT),
    "length": Maybe(COUNT),
    "windows": Maybe(COUNT),
    "perplexity": Maybe(POSITIVE),
    "nats_per_token": Maybe(NUMBER),
    "bits_per_byte": Maybe(NUMBER),
    "associative_recall": Maybe(
        {
            "candidates": POSITIVE,
            "digest": Maybe(TEXT),
            "points": [
                {"pairs": POSITIVE, "accuracy": NUMBER, "stderr": Maybe(NUMBER), "questions": Maybe(COUNT)},
            ],
        }
    ),
    "lm_eval": Maybe(
        {
            "averages": Maybe(Each(NUMBER)),
            "tasks": Each(
                {
                    "metrics": Each(Maybe(NUMBER)),
                    "stderr": Maybe(Each(Maybe(NUMBER))),
                    "higher_is_better": Maybe(Each(TRUTH)),
                    "samples": Maybe(COUNT),
                }
            ),
        }
    ),
}
EVALUATION = {
    **RESULT,
    **ORIGIN,
    "baseline": Maybe(RESULT),
    "compared": Maybe([{"measure": TEXT, "share": Maybe(NUMBER)}]),
}
PLAN = {
    **ORIGIN,
    "model_type": TEXT,
    "width": WHOLE,
    "key_dim": WHOLE,
    "method": TEXT,
    "score": TEXT,
    "model": {"source": TEXT, "fingerprint": Maybe(TEXT), "loader": LOADER},
    "calibration": Maybe(WINDOWS),
    "certificate": Maybe(Each(Maybe(NUMBER))),
    "parent": Maybe({"method": TEXT, "width": WHOLE, "key_dim": WHOLE}),
    "layers": Each(
        {
            "keep": Maybe([[COUNT]]),
            "basis": Maybe({"shape": [WHOLE]}),
            "rho": Maybe([Maybe(NUMBER)]),
            "condition_before": Maybe([Maybe(NUMBER)]),
            "condition_after": Maybe([Maybe(NUMBER)]),
        }
    ),
}
NATS = {"before": NUMBER, "after": NUMBER, "uncut": Maybe(NUMBER), "control": Maybe(NUMBER)}
RECOVERY = {
    **MODEL,
    **ORIGIN,
    "teacher": Maybe({"model": TEXT, "fingerprint": Maybe(TEXT)}),
    "settings": {"adaptation": {"full": TRUTH}, "length": WHOLE, "batch_size": WHOLE},
    "corpus": Maybe({"data": Maybe(TEXT), "digest": Maybe(TEXT)}),
    "tokens": COUNT,
    "measured": {"text": Maybe(TEXT), "tokens": COUNT, "nats": NATS, "closed": Maybe(Each(Maybe(NUMBER)))},
    "log": Maybe([{"step": COUNT, "loss": NUMBER}]),
}
SHAPES = {
    "sweep": SWEEP, "trace": TRACE, "filters": FILTERS, "evaluation": EVALUATION, "plan": PLAN, "recovery": RECOVERY,
}  # fmt: skip


def complaint(found: Found) -> str | None:
    """Why a record cannot be drawn; None where it can."""
    return misfit(found.data, SHAPES[found.kind]) or contradiction(found.kind, found.data)


def contradiction(kind: str, data: Data) -> str | None:
    """Where fields of the right shape do not fit each other."""
    tests = {
        "sweep": _sweep_contradiction,
        "trace": _trace_contradiction,
        "filters": _filters_contradiction,
        "evaluation": _evaluation_contradiction,
        "plan": _plan_contradiction,
    }
    return tests[kind](data) if kind in tests else None


def _sweep_contradiction(sweep: Data) -> str | None:
    row = (sweep.get("recommended") or {}).get("row")
    return f"recommended.row {row} is none of its rows" if row is not None and row >= len(sweep["rows"]) else None


def _trace_contradiction(trace: Data) -> str | None:
    rows, heads, counts = len(trace["layers"]), trace["heads"], trace["histogram"]["counts"]
    by_head = {name: trace[name] for name in ("utilisation_by_head", "kappa_by_head", "spectrum")}
    for name, layers in {**by_head, "histogram.counts": counts}.items():
        if len(layers) != rows or any(len(layer) != heads for layer in layers):
            return f"{name} is not of {rows} layers and {heads} heads"
    if any(not sum(head) for layer in counts for head in layer):
        return "histogram.counts has a head of which no state was counted"
    if trace["histogram"]["high"] <= trace["histogram"]["low"]:
        return "histogram.high is not above histogram.low"
    if len(trace["curve"]) != len(trace["times"]):
        return "curve and times have different lengths"
    if any(abs(value) > 300 for layer in trace["spectrum"] for head in layer for value in head):
        return "spectrum holds numbers that are no logarithms of singular values"
    names = ("effective_rank", "amplification", "amplification_lower", "amplification_upper")
    states = trace["bounds"]["states"]
    if any(len(trace["bounds"].get(name) or ()) != states for name in names):
        return f"bounds does not hold {states} states"
    return None


def _filters_contradiction(record: Data) -> str | None:
    layers = list(record["filters"].values())
    if any(layer.keys() != layers[0].keys() for layer in layers):
        return "filters has other roles in one layer than in another"
    for layer in layers:
        for role, heads in layer.items():
            taps = {len(channel) for head in heads for channel in head}
            if len(taps) > 1 or len({len(head) for head in heads}) > 1:
                return f"filters of the {role} differ in size from head to head"
    return None


def _evaluation_contradiction(record: Data) -> str | None:
    measured = any(record.get(name) for name in ("perplexity", "lm_eval", "associative_recall"))
    return None if measured else "it holds neither a perplexity nor a task nor recall"


def head_count(layer: Data) -> int:
    """The heads of a layer of a plan, whether they keep channels or directions."""
    return len(layer["keep"]) if layer.get("keep") is not None else int((layer["basis"]["shape"] or [0])[0])


def _plan_contradiction(plan: Data) -> str | None:
    for name, layer in plan["layers"].items():
        if (layer.get("keep") is None) == (layer.get("basis") is None):
            return f"layers.{name} keeps neither channels nor directions, or both"
        heads = head_count(layer)
        if max((channel for head in layer.get("keep") or () for channel in head), default=0) >= plan["width"]:
            return f"layers.{name} keeps a channel beyond its width of {plan['width']}"
        claims = (layer.get(claim) for claim in ("rho", "condition_before", "condition_after"))
        if any(claim and len(claim) != heads for claim in claims):
            return f"layers.{name} certifies another number of heads than it cuts"
    return None
