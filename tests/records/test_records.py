"""Records: strict JSON, written whole or not at all, read from any folder; only our own files are replaced."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import slimstate
from places import ROOT, TESTS
from slimstate.benchmark.tables import as_markdown
from slimstate.checkpoints.model_card import render
from slimstate.core.file_names import PLAN
from slimstate.records.benchmark import CalibrationRecord, DecodeRecord, MixerRecord, ModelRecord
from slimstate.records.folder import check_drawings, check_record, read_records
from slimstate.records.numbers import brief, fixed, magnitude, mebibytes
from slimstate.records.parts import Origin
from slimstate.records.plan import Plan
from slimstate.records.provenance import command_line, run_config
from slimstate.records.training import Measurements, Nats, RecoveryRecord, TrainingRecord
from slimstate.system.errors import DataError, OutputError
from slimstate.system.json_files import plain, write_json

EXAMPLES = TESTS / "records" / "examples"
TRAININGS = {"recovery": RecoveryRecord, "training": TrainingRecord}
BENCHMARKS = {"mixer": MixerRecord, "model": ModelRecord, "decode": DecodeRecord, "calibrate": CalibrationRecord}
CLEAR, ONE = ({name: tuple(values) for name, values in windows.items()} for windows in (
    {"before": (4.4, 4.6), "after": (4.11, 4.29), "uncut": (3.95, 4.05)},
    {"before": (4.5,), "after": (4.2,), "uncut": (4.0,)},
))  # fmt: skip


def test_a_cut_of_keys_and_values_saves_state_by_both():
    plan = Plan.read(EXAMPLES / "plan.json")
    both = replace(plan, value_width=16, value_dim=4, value_method="l1")
    assert (plan.state_saved, both.state_saved) == (plan.compression, 1 - (1 - plan.compression) / 4)


def test_numbers_are_readable():
    assert [magnitude(x) for x in (None, 1.234, 12345.6, 1.5e7)] == ["∞", "1.23", "12,346", "1.5e+07"]
    assert [brief(x) for x in (None, 5.44, 103.2, 65580.0, 2.1e6, 3e15)] == ["∞", "5.4", "103", "66k", "2M", "3e15"]
    assert [fixed(x, 1) for x in (None, -1.3, -0.01, 1234.5)] == ["–", "−1.3", "0.0", "1,234.5"]
    assert [mebibytes(x) for x in (2**17, 2**20, 3 * 2**30)] == ["0.125", "1.00", "3,072.00"]


@pytest.mark.parametrize(("changes", "share"), [
    ({}, 0.6), ({"tokens": 128}, 0.6), ({"closed": {"uncut": 4.6}}, None), ({"closed": {"uncut": -0.2}}, None),
    ({"closed": {"uncut": None}}, None), ({"window_nats": ONE}, None), ({"window_nats": CLEAR}, None),
    ({"window_nats": CLEAR, "gain_error": 0.01}, 0.6), ({"window_nats": CLEAR, "gain_error": 0.2}, None),
    ({"window_nats": {**CLEAR, "uncut": (3.0, 5.0)}, "gain_error": 0.01}, None),
])  # fmt: skip
def test_a_share_of_a_gap_is_claimed_only_where_it_was_measured_well(changes, share):
    """On the terminal, on the card and in the headline; elsewhere they have nats with their standard error."""
    facts = {"tokens": 20_000, "nats": Nats(before=4.5, after=4.2, uncut=4.0), "closed": {"uncut": 0.6}, **changes}
    measured = Measurements(**facts)
    assert measured.closed_share("uncut") == share
    (line,) = measured.gaps({"uncut": "the uncut model"})
    names = {"before": "before", "after": "after", "uncut": "the uncut model"}
    card = render("measured.md", measured=measured, measured_on="a text", titles=names)
    assert ("60%" in line) == ("60%" in card) == (share is not None)
    assert ("+0.200" in line) == ("+0.200" in card) == (share is None)
    assert ("±" in line) == (share is None and len(measured.window_nats.get("uncut", ())) > 1)
    assert ("128 held-out tokens are too few" in card) == (measured.tokens == 128)
    record = replace(RecoveryRecord.read(EXAMPLES / "recovery.json"), measured=measured)
    assert ("60%" in record.headline()) == (share is not None)


def test_what_is_written_is_strict_json_and_reads_back(tmp_path):
    record = {"kind": "sweep", "rows": [{"a": math.inf, "b": torch.tensor([1.5, math.nan])}], "n": 3, "x": None}
    write_json(tmp_path / "deep" / "r.json", record)
    text = (tmp_path / "deep" / "r.json").read_text()
    found = {"kind": "sweep", "rows": [{"a": None, "b": [1.5, None]}], "n": 3, "x": None}
    assert json.loads(text, parse_constant=pytest.fail) == found
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]
    assert plain([0.123456, 123456.0, True, "x"], 3) == [0.123, 123000.0, True, "x"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        write_json(tmp_path / "file" / "r.json", {})


def test_a_config_becomes_a_command_line():
    options = {"text": "a file.txt", "limit": None, "recall": True, "force": False, "scores": ("kq", "k"), "seed": 0}
    config = run_config("eval", {"model": Path("my model")}, options)
    values = {"text": "a file.txt", "recall": True, "scores": ["kq", "k"], "seed": 0}
    assert config == {"command": "eval", "model": "my model", **values}
    line = "slimstate eval 'my model' --text 'a file.txt' --recall --scores kq,k --seed 0"
    assert command_line(config) == Origin(config=config).command == line
    assert command_line({"command": "analyze", "out": "x", "models": ["a", "b"]}) == "slimstate analyze a b --out x"
    assert command_line({"command": "bench mixer", "models": ["a"]}) == "slimstate bench mixer --models a"
    with pytest.raises(ValueError, match="must name its command"):
        Origin(config={"model": "x"})


def test_records_are_read_and_other_files_are_skipped(tmp_path):
    (tmp_path / "a").mkdir()
    shutil.copy(EXAMPLES / "sweep.json", tmp_path / "a")
    shutil.copy(EXAMPLES / "plan-copy.json", tmp_path / "a")
    write_json(tmp_path / "partial.json", {"kind": "filters", "name": "x"})
    write_json(tmp_path / "other.json", {"kind": "something else"})
    write_json(tmp_path / ".hidden" / "trace.json", {"kind": "trace"})
    (tmp_path / "broken.json").write_text('{"kind": ')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "listed.json").write_text('{"kind": ["sweep"]}')
    os.mkfifo(tmp_path / "trace.json")
    model = tmp_path / "model"
    write_json(model / "config.json", {"kind": "sweep"})
    write_json(model / "tokenizer.json", {"kind": "trace"})
    shutil.copy(EXAMPLES / "plan.json", model / PLAN)
    records = read_records(tmp_path)
    assert records.counts() == {"sweep": 1, "plan": 2}
    assert [(sweep.path.name, sweep.record.width) for sweep in records.sweep] == [("sweep.json", 8)]
    assert [(plan.path.name, plan.record.folder) for plan in records.plan] == [("plan-copy.json", "slim"), (PLAN, None)]
    broken, deep, partial, pipe = records.skipped
    assert "broken.json was skipped: it is not JSON" in broken
    assert "deep.json was skipped: it is not JSON: RecursionError" in deep
    assert "trace.json was skipped: cannot read" in pipe
    assert "partial.json was skipped: not a valid filters record: object missing required field `model`" in partial
    with pytest.raises(DataError, match="no folder"):
        read_records(tmp_path / "nowhere")


def test_a_copy_of_a_plan_names_the_folder_of_the_cut_model():
    plan, copy = Plan.read(EXAMPLES / "plan.json"), Plan.read(EXAMPLES / "plan-copy.json")
    assert (plan.folder, copy.folder) == (None, "slim")
    assert copy.same_cut(plan)
    assert not Plan.read(EXAMPLES / "plan-directions.json").same_cut(plan)
    assert (copy.model.source, copy.model.loader.library, copy.calibration.samples) == ("toy", "fla", 4)


def is_part_of(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(is_part_of(value, whole.get(name)) for name, value in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(is_part_of, part, whole))
    return bool(part == whole)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "records").glob("bench-*.json")), ids=lambda path: path.stem)
def test_benchmarks_of_the_docs_are_read_without_loss(path):
    """Every number is read under its name; rows that failed are rows."""
    data = json.loads(path.read_text())
    record = BENCHMARKS[data["bench"]].read(path)
    assert is_part_of(data, record.to_json())
    assert as_markdown(record).count("out of memory") == sum(row.error is not None for row in record.rows)


@pytest.mark.parametrize(("name", "count"), [("recovery", 24), ("hybrids", 2), ("shared-filters", 3)])
def test_records_of_the_docs_are_read_without_loss(name, count):
    objects: list[dict[str, Any]] = []
    text = (ROOT / "docs" / "records" / f"{name}.json").read_text()
    json.loads(text, object_hook=lambda data: objects.append(data) or data)
    records = [data for data in objects if data.get("kind") in TRAININGS]
    assert len(records) == count
    for data in records:
        data.pop("run", None)  # a label of the docs
        assert is_part_of(data, TRAININGS[data["kind"]].from_json(data).to_json())


@pytest.mark.parametrize("text", ["years of work", "{}", "[]", '{"kind": 3}', ""])
def test_a_file_that_is_no_record_is_not_replaced(text, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(OutputError, match=r"file.json exists and is not a slimstate record"):
        check_record(tmp_path / "file.json")


def test_records_and_what_was_drawn_from_them_are_replaced(tmp_path):
    for path in (*EXAMPLES.glob("*.json"), EXAMPLES / "nothing.json"):
        check_record(path)
    (tmp_path / "notes.txt").write_text("x")
    check_drawings(tmp_path, ["pareto.*"], "sweep.json")
    (tmp_path / "pareto.png").write_text("x")
    with pytest.raises(OutputError, match=r"pareto.png exists and no slimstate record is beside it"):
        check_drawings(tmp_path, ["pareto.*"], "sweep.json")
    shutil.copyfile(EXAMPLES / "sweep.json", tmp_path / "sweep.json")
    check_drawings(tmp_path, ["pareto.*"], "sweep.json")


def test_commands_refuse_to_replace_files_before_they_work(folders, text_file, tmp_path, monkeypatch):
    model = folders["delta_net-plain"]
    monkeypatch.setattr("slimstate.models.load.stock_class", None)  # no model may be loaded
    for name in ("sweep.md", "spectra.pdf", "evaluation.json"):
        (tmp_path / name).write_text("mine")
    for command in (
        lambda: slimstate.sweep(model, tmp_path, text=text_file),
        lambda: slimstate.analyze([model], text_file, tmp_path),
        lambda: slimstate.evaluate(model, text_file, out=tmp_path / "evaluation.json"),
    ):
        with pytest.raises(OutputError, match="choose another"):
            command()
    assert {path.read_text() for path in tmp_path.iterdir()} == {"mine"}
