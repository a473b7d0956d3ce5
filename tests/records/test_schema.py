"""The schema of records: annotations alone say what a file must hold, and what does not fit is named by its place."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import pytest

from slimstate.records.base import Record
from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.plan import PlanRecord
from slimstate.records.schema import FILLED, Count, Misfit, Positive, Whole, read, written
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.records.sweep import SweepRecord
from slimstate.records.training import RecoveryRecord, TrainingRecord
from slimstate.system.errors import DataError, PlanError

OLD = Path(__file__).parent / "v0_1"
TYPES = (SweepRecord, TraceRecord, FiltersRecord, EvaluationRecord, RecoveryRecord, TrainingRecord)
SCALARS = {
    int: (-7, 0, 1, 24, 2**40),
    float: (-1.5, -0.0, 0.1, 1e-300, 1e299, 3),
    str: ("", "drrqr", "κ → ∞", 'a\n"b"', "null"),
    bool: (True, False),
    Any: (None, True, "x", [1, [None]], {"a": {"b": 0.5}}),
}


def made(kind: Any, draw: Random) -> Any:
    """Something that an annotation allows, by a second reading of annotations."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in SCALARS:
        return draw.choice(SCALARS[kind])
    if origin is Annotated:
        return next(value for _ in range(1000) if parts[1].holds(value := made(parts[0], draw)))
    if origin in (typing.Union, types.UnionType):
        part = draw.choice(parts)
        return None if part is type(None) else made(part, draw)
    if origin is tuple:
        return tuple(made(parts[0], draw) for _ in range(draw.randrange(3)))
    if origin is not None and issubclass(origin, Mapping):
        return {name: made(parts[1], draw) for name in draw.sample(SCALARS[str], draw.randrange(3))}
    annotations = typing.get_type_hints(kind, include_extras=True)
    return kind(
        **{item.name: made(annotations[item.name], draw) for item in dataclasses.fields(kind) if item.name != "config"}
    )


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.KIND)
def test_what_is_written_reads_back_as_it_was(kind):
    """Whatever the annotations allow, also what contradicts itself."""
    for seed in range(30):
        value = made(kind, Random(seed))
        text = json.dumps(written(value), allow_nan=False)
        assert read(kind, json.loads(text)) == value, seed


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.KIND)
def test_a_file_gives_the_very_record_back(tmp_path, kind):
    record = kind.read(OLD / f"{kind.KIND}.json")
    record.write(tmp_path / "again.json")
    assert kind.read(tmp_path / "again.json") == record
    assert json.loads((tmp_path / "again.json").read_text())["format"] == kind.FORMAT


@pytest.mark.parametrize("kind", [*TYPES, PlanRecord], ids=lambda kind: kind.KIND)
def test_fields_of_other_versions_are_passed_over_at_any_depth(kind):
    data = json.loads((OLD / f"{kind.KIND}.json").read_text())

    def extended(value: Any) -> Any:
        if isinstance(value, list):
            return [extended(item) for item in value]
        if not isinstance(value, dict) or not {"model", "method", "library", "states", "step"} & value.keys():
            return value
        return {**{name: extended(item) for name, item in value.items()}, "of_the_future": {"x": [1]}}

    assert kind.from_json(extended(data)).to_json() == kind.from_json(data).to_json()


@pytest.mark.parametrize("kind", [*TYPES, PlanRecord], ids=lambda kind: kind.KIND)
def test_a_newer_format_is_refused_and_an_unnamed_one_is_the_first(tmp_path, kind):
    data = json.loads((OLD / f"{kind.KIND}.json").read_text())
    path = tmp_path / "newer.json"
    path.write_text(json.dumps({**data, "format": 2}))
    with pytest.raises(DataError, match=rf"newer\.json is not a record of a {kind.KIND}: it is of format 2.*format 1"):
        kind.read(path)


def changed(data: Any, place: str, value: Any) -> Any:
    """A copy with another value at a place such as rows/0/perplexity; `...` takes it away."""
    whole = inner = deepcopy(data)
    *way, last = place.split("/")
    for step in way:
        inner = inner[int(step)] if isinstance(inner, list) else inner[step]
    if value is ...:
        del inner[last]
    else:
        inner[int(last) if isinstance(inner, list) else last] = value
    return whole


MISFITS = [
    ("sweep", "rows/0/perplexity", 0, "rows[0].perplexity is not a positive number"),
    ("sweep", "rows/0/perplexity", "low", "rows[0].perplexity is not a positive number"),
    ("sweep", "rows/0/perplexity", 1e308, "rows[0].perplexity is not a positive number"),
    ("sweep", "rows/0/method", ..., "rows[0].method is missing"),
    ("sweep", "rows/0/method", "\ud800", "rows[0].method is not text"),
    ("sweep", "rows/0/kappa", True, "rows[0].kappa is not a number"),
    ("sweep", "rows", [], "rows is not a list with something in it"),
    ("sweep", "rows", {}, "rows is not a list with something in it"),
    ("sweep", "width", 0, "width is not a whole number above zero"),
    ("sweep", "width", 8.0, "width is not a whole number above zero"),
    ("sweep", "uncut", None, "uncut is missing"),
    ("sweep", "uncut", 3, "uncut is not an object with something in it"),
    ("sweep", "recommended/row", 5, "recommended.row 5 is none of its rows"),
    ("sweep", "recommended/within", 1, "recommended.within is not true or false"),
    ("sweep", "versions/torch", 2, "versions.torch is not text"),
    ("trace", "layers", [0, -1], "layers[1] is not a count"),
    ("trace", "histogram/counts/0/1", [0] * 110, "histogram.counts has a head of which no state was counted"),
    ("trace", "histogram/high", -9.0, "histogram.high is not above histogram.low"),
    ("trace", "spectrum/0/0/0", 301, "spectrum holds numbers that are no logarithms of singular values"),
    ("trace", "kappa_by_head", [[1.0, None]], "kappa_by_head is not of 2 layers and 2 heads"),
    ("trace", "curve", [0.1], "curve and times have different lengths"),
    ("trace", "bounds/states", 15, "bounds does not hold 15 states"),
    ("trace", "cut/key_dim", 0, "cut.key_dim is not a whole number above zero"),
    ("filters", "filters/0/key/0", [[0.1]], "filters of the key differ in size from head to head"),
    ("filters", "filters/1", {"key": [[[0.1]]]}, "filters has other roles in one layer than in another"),
    ("filters", "filters", {}, "filters is not an object with something in it"),
    ("filters", "likeness/key", {}, "likeness.key is not an object with something in it"),
    ("filters", "likeness/key/0", "x", "likeness.key.0 is not a list with something in it"),
    ("evaluation", "lm_eval/tasks/lambada_openai/metrics", {},
     "lm_eval.tasks.lambada_openai.metrics is not an object with something in it"),
    ("evaluation", "associative_recall/points/1/pairs", -2,
     "associative_recall.points[1].pairs is not a positive number"),
    ("evaluation", "baseline/name", 1, "baseline.name is not text"),
    ("recovery", "measured/nats/before", None, "measured.nats.before is missing"),
    ("recovery", "settings/adaptation/full", 0, "settings.adaptation.full is not true or false"),
    ("recovery", "log/0/step", -1, "log[0].step is not a count"),
    ("recovery", "tokens", 2.5, "tokens is not a count"),
    ("plan", "width", "wide", "width is not a whole number"),
    ("plan", "key_dim", 0, "key_dim is not a whole number above zero"),
    ("plan", "key_dim", 9, "key_dim 9 is above the width of 8"),
    ("plan", "seed", 0.5, "seed is not a whole number"),
    ("plan", "layers/0/keep/0", "x", "layers.0.keep[0] is not a list with something in it"),
    ("plan", "layers/0/keep/0/0", 1.5, "layers.0.keep[0][0] is not a count"),
    ("plan", "method", ..., "method is missing"),
    ("plan", "model/source", 1, "model.source is not text"),
    ("plan", "calibration", {"samples": -1}, "calibration.samples is not a count"),
    ("plan", "parent", {"method": "l1", "width": 9}, "parent.key_dim is missing"),
    ("plan", "layers", {}, "layers is not an object with something in it"),
    ("plan", "layers/0/keep", ..., "layers.0 keeps neither channels nor directions, or both"),
    ("plan", "layers/0/basis", {"shape": [1], "float32": ""}, "layers.0 keeps neither channels nor directions"),
    ("plan", "layers/0/keep/0", [1, 2, 3, 8], "layers.0 keeps a channel beyond its width of 8"),
    ("plan", "layers/0/keep/0", [1, 1, 2, 3], "keep must be non-empty, non-negative and ascending in every head"),
    ("plan", "layers/0/rho", [1.0], "layers.0 certifies another number of heads than it cuts"),
    ("plan", "layers/0/rho", ["x", 1.0], "layers.0.rho[0] is not a number"),
    ("plan", "folder", 1, "folder is not text"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "place", "value", "words"), MISFITS)
def test_what_does_not_fit_is_named_by_its_place(kind, place, value, words):
    typed = {record.KIND: record for record in (*TYPES, PlanRecord)}[kind]
    data = json.loads((OLD / f"{kind}.json").read_text())
    with pytest.raises(Misfit) as caught:
        typed.from_json(changed(data, place, value))
    assert words in str(caught.value)


def test_an_evaluation_that_measured_nothing_is_no_evaluation():
    with pytest.raises(Misfit, match="neither a perplexity nor a task nor recall"):
        EvaluationRecord.from_json({"name": "a", "model": "a"})


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: Whole = 3

    def __post_init__(self) -> None:
        if self.size == 13:
            raise PlanError("`size` 13 is unlucky: use 12")


@dataclass(frozen=True, kw_only=True)
class Toy(Record):
    KIND: ClassVar[str] = "toy"
    FORMAT: ClassVar[int] = 3

    colour: Literal["red", "blue"]
    named: int = dataclasses.field(default=0, metadata={"json": "class"})
    either: float | str | None = None
    inner: Inner | None = None
    inners: Annotated[tuple[Inner, ...], FILLED] = (Inner(),)
    counts: Mapping[str, Count] = dataclasses.field(default_factory=dict)
    size: Positive = 1.0


TOY = {"colour": "red", "format": 3}


def test_what_is_null_or_not_there_is_the_default():
    plain = Toy(colour="red")
    assert Toy.from_json(TOY) == Toy.from_json({**TOY, "class": None, "inner": None, "size": None}) == plain
    assert Toy.from_json({**TOY, "inner": {}, "counts": {}}) == plain  # an object without fields says nothing
    assert plain.to_json() == {
        "kind": "toy", "format": 3, "colour": "red", "class": 0, "either": None, "inner": None,
        "inners": [{"size": 3}], "counts": {}, "size": 1.0,
    }  # fmt: skip


def test_a_field_may_have_another_name_in_files_and_one_of_several_types():
    assert Toy.from_json({**TOY, "class": 4, "either": "x", "named": 5}) == Toy(colour="red", named=4, either="x")
    assert Toy.from_json({**TOY, "either": 0.5}).either == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"colour": "green"}, "colour is not one of red, blue"),
        ({"either": []}, "either is not text"),
        ({"inners": [{}, {"size": 0}]}, "inners[1].size is not a whole number above zero"),
        ({"inner": {"size": 13}}, "inner cannot be: `size` 13 is unlucky: use 12"),
        ({"counts": {"a": -1}}, "counts.a is not a count"),
        ({"size": float("nan")}, "size is not a positive number"),
        ({"format": 1}, "it is of format 1, and this version reads format 3"),
    ],
)
def test_a_misfit_is_told_in_words(change, words):
    with pytest.raises(Misfit) as caught:
        Toy.from_json({**TOY, **change})
    assert str(caught.value) == words


def test_what_is_no_object_is_refused(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(DataError, match="not a JSON object"):
        Toy.read(tmp_path / "list.json")
    with pytest.raises(Misfit, match="it is not an object with something in it"):
        read(Toy, [1])
