"""Records of trainings on the pages are read, and say the same when they are written again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from places import ROOT
from slimstate.records.training import RecoveryRecord, TrainingRecord

KINDS = {"recovery": RecoveryRecord, "training": TrainingRecord}
FOLDER = ROOT / "docs" / "records"


def records(value: Any) -> Iterator[dict[str, Any]]:
    """Those in a file that holds several, at any depth."""
    if isinstance(value, dict) and value.get("kind") in KINDS:
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from records(inner)


def lost(before: Any, after: Any, place: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from lost(value, after.get(name), f"{place}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, value in enumerate(before):
            yield from lost(value, after[number], f"{place}[{number}]")
    elif before != after:
        yield place


@pytest.mark.parametrize(("name", "count"), [("recovery", 73), ("hybrids", 2), ("shared-filters", 3)])
def test_records_on_the_pages_are_read_and_nothing_is_lost(name, count):
    found = list(records(json.loads((FOLDER / f"{name}.json").read_text())))
    assert len(found) == count
    for old in found:
        record = KINDS[old["kind"]].from_json(old)
        kept = {field: value for field, value in old.items() if field != "run"}  # a label of the page of experiments
        assert list(lost(kept, record.to_json())) == []


def test_a_record_without_what_it_is_of_is_refused_with_the_place(tmp_path):
    (old, *_) = records(json.loads((FOLDER / "recovery.json").read_text()))
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**old, "measured": {**old["measured"], "nats": {"before": 4.5}}}))
    with pytest.raises(Exception, match=r"record.json is not a record of a recovery: measured.nats.after is missing"):
        RecoveryRecord.read(path)
