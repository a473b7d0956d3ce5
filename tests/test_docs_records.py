"""The records behind the docs: the types of today read them, and they agree with each other."""

from __future__ import annotations

import json

import pytest

from command import run
from places import ROOT
from slimstate.records.benchmark import KernelRecord
from slimstate.records.sweep import SweepRecord

RECORDS = ROOT / "docs" / "records"
SWEEPS = sorted(set(RECORDS.glob("sweep-*.json")) - set(RECORDS.glob("*-dtypes.json")))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweeps_of_one_model_use_the_same_text(path):
    sweep, main = SweepRecord.read(path), SweepRecord.read(RECORDS / f"{path.stem.rsplit('-', 1)[0]}-main.json")
    assert sweep.settings.text == main.settings.text
    assert sweep.uncut == main.uncut
    assert all(row.word_perplexity for row in sweep.rows)


def test_shipped_curves_of_kernels_equal_the_records():
    printed = json.loads((RECORDS / "vllm-kernels.json").read_text())["rows"]
    timed = json.loads((RECORDS / "vllm-kernels-mamba2.json").read_text())["rows"]
    times = {(row["model"], row["mode"], row["key_dim"]): row["ms"] / 1000 for row in printed}
    times |= {(row["model"], row["mode"], row["key_dim"]): row["seconds"] for row in timed}
    for path in (ROOT / "src/slimstate/serving/curves").glob("h200-vllm-*.json"):
        for row in KernelRecord.from_json(json.loads(path.read_text())).rows:
            assert row.time == pytest.approx(times[row.model, row.mode, row.key_dim])


@pytest.mark.parametrize("pool", json.loads((RECORDS / "pool.json").read_text())["pools"])
def test_inspect_counts_the_sequences_of_the_record(pool, capsys, monkeypatch):
    words = ["--engine", "vllm", "--memory-gb", 40, "--context", pool["context"], "--json"]
    words += ["--prefix-caching"] * pool["prefix_caching"]
    code, out, err = run(capsys, monkeypatch, "inspect", ROOT / pool["model"], *words)
    assert code == 0, err
    rows = {row["key_dim"]: row for row in json.loads(out)["rows"]}
    assert [rows[row["key_dim"]] for row in pool["rows"]] == pool["rows"]
