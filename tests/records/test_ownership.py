"""Records, and what is drawn from them, replace their own kind and nothing else."""

from __future__ import annotations

import shutil

import pytest

from places import TESTS
from slimstate.evaluation.analyze import analyze
from slimstate.evaluation.evaluate import evaluate
from slimstate.evaluation.sweep import sweep
from slimstate.records.ownership import check_drawn, check_record
from slimstate.system.errors import OutputError

OLD = TESTS / "records" / "v0_1"


@pytest.mark.parametrize("text", ["years of work", "{}", "[]", '{"kind": 3}', ""])
def test_a_file_of_others_is_no_record(text, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(OutputError, match=r"file.json is no record that slimstate wrote, and is not replaced"):
        check_record(tmp_path / "file.json")


@pytest.mark.parametrize("name", ["evaluation", "bench-mixer", "trace", "filters", "plan-copy", "sweep"])
def test_records_of_any_version_are_known(name):
    check_record(OLD / f"{name}.json")
    check_record(OLD / "nothing.json")


def test_figures_are_ours_beside_a_record(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    check_drawn(tmp_path, ["pareto.*"], "sweep.json")
    (tmp_path / "pareto.png").write_text("x")
    with pytest.raises(OutputError, match=r"pareto.png is there, and no record of slimstate beside it"):
        check_drawn(tmp_path, ["pareto.*"], "sweep.json")
    shutil.copyfile(OLD / "sweep.json", tmp_path / "sweep.json")
    check_drawn(tmp_path, ["pareto.*"], "sweep.json")


def test_verbs_refuse_before_they_work(folders, text_file, tmp_path, monkeypatch):
    model = folders["delta_net-plain"]
    monkeypatch.setattr("slimstate.models.load.load", None)
    (tmp_path / "sweep.md").write_text("mine")
    (tmp_path / "spectra.pdf").write_text("mine")
    (tmp_path / "evaluation.json").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for verb in (
        lambda: sweep(model, tmp_path, text=text_file),
        lambda: analyze([model], text_file, tmp_path),
        lambda: evaluate(model, text_file, out=tmp_path / "evaluation.json"),
    ):
        with pytest.raises(OutputError, match="not replaced"):
            verb()
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
