"""The schema of records: annotations alone say what a file must hold; an error names the place that does not fit."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import field
from typing import Annotated, Any, Literal

import pytest

from places import TESTS
from slimstate.records.base import Record
from slimstate.records.evaluation import EvaluationRecord, SweepRecord
from slimstate.records.plan import Plan
from slimstate.records.schema import IN_MEMORY, NON_EMPTY, Count, Positive, ValidationError, Value, Whole, from_json
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.records.training import RecoveryRecord, TrainingRecord
from slimstate.system.errors import MAX_LINE, PlanError

EXAMPLES = TESTS / "records" / "examples"
KINDS = (SweepRecord, TraceRecord, FiltersRecord, EvaluationRecord, RecoveryRecord, TrainingRecord, Plan)
TYPES = {kind.KIND: kind for kind in KINDS}


def example(kind: str) -> dict[str, Any]:
    return dict(json.loads((EXAMPLES / f"{kind}.json").read_text()))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_is_the_same_after_reading_and_writing(path, tmp_path):
    kind = TYPES.get(example(path.stem)["kind"])
    if kind is not None:
        kind.read(path).write(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", TYPES)
def test_unknown_fields_are_ignored_at_any_depth(kind):
    data = example(kind)

    def extend(value: Any) -> Any:
        if isinstance(value, list):
            return [extend(item) for item in value]
        if not isinstance(value, dict) or not {"model", "method", "library", "states", "step"} & value.keys():
            return value
        return {**{name: extend(item) for name, item in value.items()}, "unknown": {"x": [1]}}

    assert TYPES[kind].from_json(extend(data)).to_json() == TYPES[kind].from_json(data).to_json()


def altered(data: Any, place: str, value: Any) -> Any:
    """Return a copy with another value at a place such as rows/0/perplexity; `...` removes it."""
    whole = inner = deepcopy(data)
    *way, last = place.split("/")
    for step in way:
        inner = inner[int(step)] if isinstance(inner, list) else inner[step]
    if value is ...:
        del inner[last]
    else:
        inner[int(last) if isinstance(inner, list) else last] = value
    return whole


INVALID = [
    ("sweep", "rows/0/perplexity", 0, "rows[0].perplexity: expected `float` > 0.0"),
    ("sweep", "rows/0/perplexity", "low", "rows[0].perplexity: expected `float | null`, got `str`"),
    ("sweep", "rows/0/perplexity", 1e308, "rows[0].perplexity: expected a finite number below 1e+300"),
    ("sweep", "rows/0/method", ..., "rows[0]: object missing required field `method`"),
    ("sweep", "rows/0/method", "\ud800", "rows[0].method: expected valid Unicode"),
    ("sweep", "rows", [], "rows: expected `array` of length >= 1"),
    ("sweep", "width", 0, "width: expected `int` >= 1"),
    ("sweep", "width", 8.0, "width: expected `int`, got `float`"),
    ("sweep", "recommended/row", 5, "recommended.row 5 is none of the rows"),
    ("sweep", "config", {"model": "x"}, "a config must name its command"),
    ("trace", "histogram/counts/0/1", [0] * 110, "histogram.counts has a head without a state"),
    ("trace", "histogram/high", -9.0, "histogram.high must be above histogram.low"),
    ("trace", "spectrum/0/0/0", 301, "spectrum must hold logarithms of singular values, within 300"),
    ("trace", "kappa_by_head", [[1.0, None]], "kappa_by_head must have 2 layers of 2 heads"),
    ("trace", "curve", [0.1], "curve and times differ in length"),
    ("trace", "bounds/states", 15, "bounds must hold 15 states"),
    ("filters", "filters/0/key/0", [[0.1]], "filters of the key differ in size from head to head"),
    ("filters", "filters/1", {"key": [[[0.1]]]}, "filters must have the same roles in every layer"),
    ("evaluation", "lm_eval/tasks/lambada_openai/metrics", {}, "metrics: expected `object` of length >= 1"),
    ("recovery", "measured/nats/before", None, "measured.nats.before: expected `float`, got `null`"),
    ("plan", "key_dim", 9, "key_dim must be at most the width 8, got 9"),
    ("plan", "method", "x" * 101, "method: expected `str` of length <= 100"),
    ("plan", "layers/0/keep/0/0", 1.5, "layers.0: keep[0][0]: expected `int`, got `float`"),
    ("plan", "layers/0/keep/0/0", 2**70, "layers.0: ValueError: Overflow"),
    ("plan", "layers/x", {"keep": [[0]]}, "layers.x: ValueError: invalid literal for int()"),
    ("plan", "calibration", {"samples": -1}, "calibration.samples: expected `int` >= 0"),
    ("plan", "parent", {"method": "l1", "width": 9}, "object missing required field `key_dim`"),
    ("plan", "layers", {}, "layers: expected `object` of length >= 1"),
    ("plan", "layers/0/keep", ..., "layers.0: a layer must keep either channels (`keep`) or directions (`basis`)"),
    ("plan", "layers/0/basis", {"shape": [1], "float32": ""}, "layers.0: a layer must keep either"),
    ("plan", "layers/0/keep/0", [1, 2, 3, 8], "layers.0 keeps a channel beyond the width 8"),
    ("plan", "layers/0/keep/0", [1, 1, 2, 3], "keep must be non-empty, non-negative and ascending in every head"),
    ("plan", "layers/0/rho", [1.0], "layers.0 must certify 2 heads"),
    ("plan", "layers/0/rho", ["x", 1.0], "layers.0: [...][0]: expected `int | float | null`, got `str`"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "place", "value", "message"), INVALID)
def test_an_invalid_value_is_named_by_its_place(kind, place, value, message):
    with pytest.raises(ValidationError) as caught:
        TYPES[kind].from_json(altered(example(kind), place, value))
    assert message in str(caught.value)


class Inner(Value):
    size: Whole = 3

    def __post_init__(self) -> None:
        if self.size > 12:
            raise (PlanError if self.size == 13 else ValueError)(f"`size` {self.size} is too large: use 12")


class Toy(Record):
    KIND = "toy"
    FORMAT = 3

    colour: Literal["red", "blue"]
    either: float | str | None = None
    inner: Inner | None = None
    inners: Annotated[tuple[Inner, ...], NON_EMPTY] = (Inner(),)
    counts: Mapping[str, Count] = field(default_factory=dict)
    size: Positive = 1.0
    data: Mapping[str, Any] = field(default_factory=dict)
    runtime: object = field(default=None, metadata=IN_MEMORY)


def test_defaults_are_written_and_values_in_memory_are_not():
    assert Toy(colour="red", size=float("inf"), runtime=object()).to_json() == {
        "kind": "toy", "format": 3, "colour": "red", "either": None, "inner": None, "inners": [{"size": 3}],
        "counts": {}, "size": None, "data": {},
    }  # fmt: skip
    assert Toy.from_json({"colour": "red", "inner": {}}) == Toy(colour="red", inner=Inner())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "green"}, "colour: invalid enum value 'green'"),
        ({"either": []}, "either: expected `float | str | null`, got `array`"),
        ({"inners": [{}, {"size": 0}]}, "inners[1].size: expected `int` >= 1"),
        ({"inner": {"size": 13}}, "`size` 13 is too large: use 12"),
        ({"inner": {"size": 14}}, "inner: `size` 14 is too large: use 12"),
        ({"counts": {"a": -1}}, "counts[...]: expected `int` >= 0"),
        ({"size": float("nan")}, "size: expected a finite number below 1e+300"),
        ({"data": {"x": [1, float("-inf")]}}, "data.x[1]: expected a finite number below 1e+300"),
        ({"data": {"x": 10**400}}, "data.x: expected a finite number below 1e+300"),
        ({"format": 1}, "format must be 3, got 1"),
    ],
)
def test_errors_name_the_place_in_one_line(change, message):
    with pytest.raises(ValidationError) as caught:
        Toy.from_json({"colour": "red", **change})
    assert str(caught.value) == message


def test_errors_are_short_whatever_the_file_says():
    with pytest.raises(ValidationError) as caught:
        Toy.from_json({"colour": "green\n" * 1000})
    assert len(str(caught.value)) <= MAX_LINE
    assert "\n" not in str(caught.value)
    with pytest.raises(ValidationError, match="expected `object`, got `array`"):
        from_json(Toy, [1])
    with pytest.raises(ValidationError, match="neither a perplexity nor a task nor recall"):
        EvaluationRecord.from_json({"name": "a", "model": "a"})
