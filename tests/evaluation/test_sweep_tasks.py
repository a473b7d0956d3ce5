"""Tasks in a sweep: what lm-eval finds for a masked model is what it finds for the cut one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from slimstate.evaluation.evaluate import EvalOptions

import slimstate
from places import ROOT
from slimstate.evaluation import sweep as sweeps
from slimstate.evaluation.sweep import SweepOptions
from slimstate.evaluation.sweep import sweep as verb
from slimstate.evaluation.sweep_grid import SweepGrid
from slimstate.records.sweep import SweepRecord
from slimstate.system.errors import DataError

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unrendered")]

MODEL, TEXT = ROOT / "demo" / "model", ROOT / "demo" / "evaluation.txt"
GRID = SweepGrid(methods=("l1",), key_dims=(45,))


def write_pages(folder: Path, count: int = 2) -> Path:
    """Pages of the demo's own text, one of them longer than the model's context."""
    folder.mkdir(exist_ok=True)
    lines = TEXT.read_text(encoding="utf-8").replace("\r\n", "\n").split("\n")
    pages = ["\n".join(lines[start : start + size]) for start, size in ((0, 60), (60, 6), (66, 4))[:count]]
    (folder / "wikitext.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    return folder


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> SweepOptions:
    data = write_pages(tmp_path_factory.mktemp("task-data"))
    return SweepOptions(text_length=128, max_tokens=256, tasks="wikitext", task_data=data, keep_norm_eps=True)


@pytest.fixture(scope="module")
def swept(options, tmp_path_factory) -> tuple[Path, SweepRecord]:
    folder = tmp_path_factory.mktemp("sweep") / "out"
    return folder, verb(MODEL, folder, text=TEXT, grid=GRID, options=options)


def word_perplexity(scores) -> float:
    return scores.tasks["wikitext"].metrics["word_perplexity"]


def test_wikitext_of_a_candidate_is_that_of_the_cut(swept, options, tmp_path):
    """Which is what lm-eval's own command finds for a folder: `test_lm_eval.py` asks it."""
    _, record = swept
    (row,) = record.rows
    cut = tmp_path / "cut"
    slimstate.prune(MODEL, cut, method="l1", key_dim=45, keep_norm_eps=True)
    ours = slimstate.evaluate(cut, tasks="wikitext", options=EvalOptions(task_data=options.task_data))
    assert word_perplexity(row.lm_eval) == pytest.approx(word_perplexity(ours.lm_eval), rel=1e-3)
    assert row.lm_eval.tasks["wikitext"].samples == 2


def test_the_uncut_model_is_given_the_tasks_too(swept, options):
    _, record = swept
    alone = slimstate.evaluate(MODEL, tasks="wikitext", options=EvalOptions(task_data=options.task_data))
    assert record.uncut.lm_eval.tasks == alone.lm_eval.tasks
    assert word_perplexity(record.uncut.lm_eval) < word_perplexity(record.rows[0].lm_eval)


def test_a_sweep_with_tasks_is_read_again_and_shown(swept):
    folder, record = swept
    assert SweepRecord.read(folder / "sweep.json") == record
    assert "--tasks wikitext --task-data" in record.command
    shown = f"{word_perplexity(record.rows[0].lm_eval):.2f}"
    for name in ("sweep.md", "sweep.tex"):
        assert shown in (folder / name).read_text()
    assert "wikitext word_perplexity" in (folder / "sweep.csv").read_text().splitlines()[0]


def test_a_sweep_goes_on_with_the_same_tasks_and_no_others(swept, options, tmp_path, monkeypatch):
    """Also where the same files lie elsewhere; rows without tasks or of fewer documents are no such rows."""
    folder, record = swept
    copy = write_pages(tmp_path / "copy")

    def again(changed: SweepOptions) -> SweepRecord:
        return verb(MODEL, folder, text=TEXT, grid=GRID, options=changed)

    with monkeypatch.context() as patch:
        patch.setattr(sweeps, "load", None)  # all rows are there
        assert again(replace(options, task_data=copy)).rows == record.rows
    for changed, words in (
        (replace(options, tasks=None, task_data=None), "another tasks"),
        (replace(options, limit=1), "another limit"),
        (replace(options, task_data=write_pages(tmp_path / "more", 3)), "another tasks"),
    ):
        with pytest.raises(DataError, match=f"is a sweep with {words}"):
            again(changed)


def test_tasks_that_cannot_be_had_are_said_before_the_model_is_loaded(options, tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "load", None)
    asked = {"text": TEXT, "grid": GRID}
    with pytest.raises(DataError, match="no task 'wikitxt'"):
        verb(MODEL, tmp_path / "out", **asked, options=replace(options, tasks="wikitxt"))
    with pytest.raises(DataError, match="no data for task piqa"):
        verb(MODEL, tmp_path / "out", **asked, options=replace(options, tasks="piqa"))
    with pytest.raises(DataError, match="`limit` 0"):
        replace(options, limit=0)
