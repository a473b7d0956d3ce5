"""Tasks in a sweep: lm-eval's result for a masked model is that for the cut one."""

import json
from pathlib import Path

import pytest

import slimstate
from places import ROOT
from slimstate.records.evaluation import SweepRecord
from slimstate.system.errors import DataError

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unrendered")]
MODEL, TEXT = ROOT / "demo" / "model", ROOT / "demo" / "evaluation.txt"


def write_pages(folder: Path, count: int = 2) -> Path:
    """Write pages of the demo's text, one of them longer than a window."""
    folder.mkdir(exist_ok=True)
    lines = TEXT.read_text(encoding="utf-8").replace("\r\n", "\n").split("\n")
    pages = ["\n".join(lines[start : start + size]) for start, size in ((0, 8), (60, 1), (66, 1))[:count]]
    (folder / "wikitext.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, object]:
    return {"tasks": "wikitext", "task_data": write_pages(tmp_path_factory.mktemp("task-data")), "max_length": 512}


@pytest.fixture(scope="module")
def options(tasks) -> dict[str, object]:
    cut = {"methods": ["l1"], "key_dims": [45], "keep_norm_eps": True}
    return {"text": TEXT, "text_length": 128, "max_tokens": 256, **tasks, **cut}


@pytest.fixture(scope="module")
def swept(options, tmp_path_factory) -> tuple[Path, SweepRecord]:
    folder = tmp_path_factory.mktemp("sweep") / "out"
    return folder, slimstate.sweep(MODEL, folder, **options)


def word_perplexity(scores) -> float:
    return scores.tasks["wikitext"].metrics["word_perplexity"]


def test_a_candidate_has_the_wikitext_perplexity_of_the_cut_and_the_uncut_model_its_own(swept, tasks, tmp_path):
    """`test_lm_eval.py` compares it with lm-eval's own command."""
    _, record = swept
    (row,) = record.rows
    slimstate.prune(MODEL, tmp_path / "cut", method="l1", key_dim=45, keep_norm_eps=True)
    cut, uncut = (slimstate.evaluate(model, **tasks) for model in (tmp_path / "cut", MODEL))
    assert word_perplexity(row.lm_eval) == pytest.approx(word_perplexity(cut.lm_eval), rel=1e-3)
    assert row.lm_eval.tasks["wikitext"].samples == 2
    assert record.uncut.lm_eval.tasks == uncut.lm_eval.tasks
    assert word_perplexity(uncut.lm_eval) < word_perplexity(cut.lm_eval)


def test_a_sweep_with_tasks_is_read_again_and_shown(swept):
    folder, record = swept
    assert SweepRecord.read(folder / "sweep.json") == record
    assert "--tasks wikitext --task-data" in record.command
    number = f"{word_perplexity(record.rows[0].lm_eval):.2f}"
    for name in ("sweep.md", "sweep.tex"):
        assert number in (folder / name).read_text()
    assert "wikitext word_perplexity" in (folder / "sweep.csv").read_text().splitlines()[0]


def test_a_sweep_continues_with_the_same_tasks_and_no_others(swept, options, tmp_path, monkeypatch):
    """Also where the same files lie elsewhere; not without tasks or with other documents."""
    folder, record = swept
    monkeypatch.setattr("slimstate.workflows.sweep.load", None)  # all rows are there
    copy = write_pages(tmp_path / "copy")
    assert slimstate.sweep(MODEL, folder, **{**options, "task_data": copy}).rows == record.rows
    for changes, settings in (
        ({"tasks": (), "task_data": None}, "tasks"),
        ({"limit": 1}, "limit"),
        ({"task_data": write_pages(tmp_path / "more", 3)}, "tasks"),
    ):
        with pytest.raises(DataError, match=f"is a sweep with another {settings}"):
            slimstate.sweep(MODEL, folder, **{**options, **changes})
