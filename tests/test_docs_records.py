"""The records behind the docs: the types of today read them, and they agree with each other."""

import json

import pytest

from command import run
from places import ROOT
from slimstate.records.benchmark import KernelRecord
from slimstate.records.evaluation import SweepRecord

RECORDS = ROOT / "docs" / "records"
WEIGHTED = sorted(RECORDS.glob("sweep-*-weighted.json"))  # on another machine than the others
SWEEPS = sorted({*RECORDS.glob("sweep-*.json")} - {*WEIGHTED, *RECORDS.glob("*-dtypes.json")})


def read_beside_main(path):
    """Return a sweep and the main one of its model, which both have the same text and the unit of the paper."""
    model = "-".join(path.stem.split("-")[:3])
    sweep, main = SweepRecord.read(path), SweepRecord.read(RECORDS / f"{model}-main.json")
    assert sweep.settings.text == main.settings.text
    assert all(row.perplexity and row.word_perplexity for row in sweep.rows)
    return sweep, main


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweeps_of_one_model_use_the_same_text_and_the_unit_of_the_paper(path):
    sweep, main = read_beside_main(path)
    assert sweep.uncut == main.uncut


@pytest.mark.parametrize("path", WEIGHTED, ids=lambda path: path.stem)
def test_sweeps_of_one_model_on_two_machines_differ_by_what_the_page_says(path):
    sweep, main = read_beside_main(path)
    assert (sweep.settings.fingerprint, sweep.settings.calibration) == (
        main.settings.fingerprint,
        main.settings.calibration,
    )
    for name in ("perplexity", "word_perplexity", "bits_per_byte", "rank_utilisation"):
        assert getattr(sweep.uncut, name) == pytest.approx(getattr(main.uncut, name), rel=2e-3), name
    on_main = {row.key: row.word_perplexity for row in main.rows}
    twice = {row.key: row.word_perplexity for row in sweep.rows if row.key in on_main}
    assert twice == pytest.approx({key: on_main[key] for key in twice}, rel=2e-3)


def test_numbers_of_the_paper_agree_with_each_other():
    """Averages are means of their columns, and summaries repeat the large tables, except where it is marked."""
    paper = json.loads((RECORDS / "paper.json").read_text())
    tasks, recall, half = paper["zero_shot"], paper["recall"], paper["half"]
    odd = []
    for model in [name for name in tasks if name != "columns"]:
        for key in ("before", "after"):
            for method, by_share in tasks[model][key].items():
                for values in by_share.values():
                    if sum(values[2:8]) / 6 != pytest.approx(values[8], abs=0.1):
                        odd.append((tasks[model]["label"], values[8]))
                short = [*by_share["50"][:2], by_share["50"][8]]
                assert half[model][key][method][:3] == short
                assert key == "before" or half[model][key][method][3] == recall[model]["after"][method]["50"][6]
        for by_share in recall[model]["after"].values():
            for values in by_share.values():
                assert sum(values[:6]) / 6 == pytest.approx(values[6], abs=0.1)
    headline = paper["headline"]
    for method, by_share in headline["after"].items():
        for share, values in by_share.items():
            full = tasks[headline["model"]]["after"][method][share]
            assert values == [*full[:2], full[8], recall[headline["model"]]["after"][method][share][6]]
    marked = {(mark["label"], mark["printed"]) for mark in paper["suspicious"]}
    assert odd
    assert marked >= {*odd}


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
