"""Records: strict JSON that is whole or not there, found again whatever lies beside them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from slimstate.core.plan import PLAN
from slimstate.records.folder import read_records
from slimstate.records.parts import Origin
from slimstate.records.provenance import command_line, run_config
from slimstate.system.errors import DataError, OutputError
from slimstate.system.json_files import plain, write_json

OLD = Path(__file__).parent / "v0_1"


def test_what_is_written_is_strict_json_and_reads_back(tmp_path):
    record = {"kind": "sweep", "rows": [{"a": math.inf, "b": torch.tensor([1.5, math.nan])}], "n": 3, "x": None}
    write_json(tmp_path / "deep" / "r.json", record)
    text = (tmp_path / "deep" / "r.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "kind": "sweep", "rows": [{"a": None, "b": [1.5, None]}], "n": 3, "x": None,
    }  # fmt: skip
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]


def test_significant_digits():
    assert plain([0.123456, 123456.0, True, "x"], 3) == [0.123, 123000.0, True, "x"]


def test_a_config_becomes_a_command_line():
    options = {
        "text": "a file.txt",
        "max_tokens": None,
        "recall": True,
        "force": False,
        "scores": ("kq", "k"),
        "seed": 0,
    }
    config = run_config("eval", {"model": Path("my model")}, options)
    assert config == {
        "command": "eval", "model": "my model", "text": "a file.txt", "recall": True, "scores": ["kq", "k"], "seed": 0,
    }  # fmt: skip
    line = "slimstate eval 'my model' --text 'a file.txt' --recall --scores kq,k --seed 0"
    assert command_line(config) == Origin(config=config).command == line
    assert command_line({"command": "analyze", "out": "x", "models": ["a", "b"]}) == "slimstate analyze a b --out x"
    assert command_line({"command": "bench mixer", "models": ["a"]}) == "slimstate bench mixer --models a"
    with pytest.raises(ValueError, match="must name its command"):
        Origin(config={"model": "x"})


def test_records_are_found_and_the_rest_is_passed_over(tmp_path):
    (tmp_path / "a").mkdir()
    shutil.copy(OLD / "sweep.json", tmp_path / "a")
    shutil.copy(OLD / "plan-copy.json", tmp_path / "a")
    write_json(tmp_path / "partial.json", {"kind": "filters", "name": "x"})
    write_json(tmp_path / "other.json", {"kind": "something else"})
    write_json(tmp_path / ".hidden" / "trace.json", {"kind": "trace"})
    (tmp_path / "broken.json").write_text('{"kind": ')
    (tmp_path / "list.json").write_text("[1]")
    model = tmp_path / "model"
    write_json(model / "config.json", {"kind": "sweep"})
    write_json(model / "tokenizer.json", {"kind": "trace"})
    shutil.copy(OLD / "plan.json", model / PLAN)
    found = read_records(tmp_path)
    assert found.counts() == {"sweep": 1, "plan": 2}
    assert [(sweep.path.name, sweep.record.width) for sweep in found.sweep] == [("sweep.json", 8)]
    assert [(plan.path.name, plan.record.folder) for plan in found.plan] == [("plan-copy.json", "slim"), (PLAN, None)]
    broken, partial = found.skipped
    assert "broken.json was skipped: it is not JSON" in broken
    assert "partial.json was skipped: as a record of a filters, model is missing" in partial
    with pytest.raises(DataError, match="no folder"):
        read_records(tmp_path / "nowhere")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        write_json(tmp_path / "file" / "r.json", {})
