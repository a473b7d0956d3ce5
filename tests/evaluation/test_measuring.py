"""analyze and eval as people use them: records and figures, two models side by side, one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from slimstate.evaluation.analyze import AnalysisOptions
from slimstate.evaluation.evaluate import EvalOptions, compare, scores_of

import slimstate
import tiny
from command import run
from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.load import load
from slimstate.records.evaluation import EvaluationRecord, LmEval, Result, TaskScores
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.report.plots import label_of, svg, utilisation_curves

pytestmark = pytest.mark.slow

NAME = tiny.PLAIN[0]


@pytest.fixture(scope="module")
def cut(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("cut") / "slim"
    slimstate.prune(folders[NAME], out, method="l1", key_dim=8)
    return out


@pytest.fixture(scope="module")
def analysed(folders, cut, text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("analysis") / "records"
    options = AnalysisOptions(length=200, every=8, skip=40)
    found = slimstate.analyze([folders[NAME], cut], text_file, out, options=options)
    assert [use.name for use in found.models] == [NAME, "slim"]
    assert {path.name for path in map(Path, found.figures)} == {p.name for p in out.iterdir()} - {
        p.name for p in out.glob("*.json")
    }
    return out


@pytest.mark.slow
def test_an_analysis_is_records_and_figures(analysed, folders, text_file):
    written = json.loads((analysed / f"trace-{NAME}.json").read_text())
    trace = TraceRecord.from_json(written)
    assert (written["kind"], trace.key_dim, trace.capacity, trace.times[-1]) == ("trace", 24, 24, 200)
    assert trace.bounds.violations == 0
    assert trace.bounds.states == len(trace.bounds.expected_upper) == 4 * 2 * 2  # readings, layers, heads
    runtime = load(folders[NAME], device="cpu")
    ids = torch.tensor(runtime.tokenizer(text_file.read_text())["input_ids"][:200])[None]
    with torch.inference_mode():
        cache = runtime.model(input_ids=ids, use_cache=True).past_key_values
    values = torch.stack([torch.linalg.svdvals(cache[layer]["recurrent_state"][0].double()) for layer in range(2)])
    rank = (values / values[..., :1]).square().sum(-1)
    assert trace.effective_rank[-1] == pytest.approx(float(rank.mean()), rel=1e-3)
    late = [u for u, time in zip(trace.utilisation[0][0], trace.times, strict=True) if time > 40]
    assert trace.utilisation_by_head[0][0] == pytest.approx(sum(late) / len(late), rel=1e-3)
    figures = {path.stem for path in analysed.glob("*.png")}
    assert figures == {path.stem for path in analysed.glob("*.pdf")}
    assert {"utilisation", "spectra", "spectrum", "utilisation-by-head", "retrieval-error"} < figures
    assert {f"filters-{NAME}", "filters-slim"} < figures


def test_filters_are_those_of_the_weights(analysed, folders):
    record = FiltersRecord.read(analysed / f"filters-{NAME}.json")
    weight = Checkpoint.open(folders[NAME]).read("model.layers.1.attn.k_conv1d.weight").squeeze(1).view(2, 24, 4)
    torch.testing.assert_close(torch.tensor(record.filters["1"]["key"]), weight, rtol=5e-3, atol=1e-3)
    unit = torch.nn.functional.normalize(weight[0], dim=-1)
    pairs = (unit @ unit.mT)[~torch.eye(24, dtype=torch.bool)]
    assert record.likeness["key"]["1"][0] == pytest.approx(float(pairs.mean()), abs=2e-3)


def test_a_figure_in_a_page_has_its_own_ids_and_the_colours_of_the_page(analysed):
    traces = [TraceRecord.read(path) for path in sorted(analysed.glob("trace-*.json"))]
    text = svg(utilisation_curves(traces), "curve")
    assert text.startswith("<svg")
    assert "var(--ink)" in text
    assert all(part.startswith("curve-") for part in text.split(' id="')[1:])
    assert label_of(traces[1]) in text


@pytest.mark.slow
def test_eval_puts_two_models_side_by_side(folders, cut, text_file, tmp_path, capsys, monkeypatch):
    record_file = tmp_path / "evaluation.json"
    code, out, _ = run(
        capsys, monkeypatch, "eval", cut, "--text", text_file, "--length", "600", "--max-tokens", "1200",
        "--associative", "--baseline", folders[NAME], "--out", record_file,
    )  # fmt: skip
    assert code == 0
    assert "share kept" in out
    record = EvaluationRecord.read(record_file)
    alone = slimstate.evaluate(folders[NAME], text_file, options=EvalOptions(length=600, max_tokens=1200))
    assert record.baseline.perplexity == alone.perplexity
    row = record.compared[0]
    assert row.measure == "perplexity"
    assert row.share == pytest.approx(alone.perplexity / record.perplexity)
    per_word, per_byte = record.compared[1:3]
    assert (per_word.measure, per_byte.measure) == ("word perplexity", "bits per byte")
    assert (per_word.model, per_word.baseline) == (record.word_perplexity, alone.word_perplexity)
    assert (per_byte.model, per_byte.baseline) == (record.bits_per_byte, alone.bits_per_byte)
    assert [row.measure for row in record.compared[3:]] == [
        f"associative recall, {pairs} pairs" for pairs in (2, 4, 8, 16, 32)
    ]
    assert record.digest.startswith("sha256:")
    assert record.versions["torch"]
    assert record.command.startswith("slimstate eval ")


def test_a_record_says_how_its_model_was_cut(analysed, folders):
    cut, uncut = (TraceRecord.read(analysed / f"trace-{name}.json") for name in ("slim", NAME))
    assert (cut.cut.method, cut.cut.score, cut.cut.key_dim, cut.cut.width) == ("l1", "kq", 8, 24)
    assert cut.cut.base_model == str(folders[NAME])
    assert uncut.cut is None


def test_shares_of_accuracies_and_of_perplexities():
    def result(perplexity, accuracy):
        tasks = {"piqa": TaskScores(metrics={"acc": accuracy, "odd": None}, higher_is_better={"acc": True})}
        scores = LmEval(tasks=tasks, averages={"zero_shot": accuracy})
        return Result(name="a", model="a", perplexity=perplexity, lm_eval=scores)

    rows = compare(result(20.0, 0.3), result(10.0, 0.6))
    assert [(row.measure, row.share) for row in rows] == [
        ("perplexity", 0.5),
        ("piqa acc", 0.5),
        ("zero-shot average", 0.5),
    ]
    assert compare(result(20.0, 0.3), result(10.0, 0.0))[1].share is None
    assert scores_of(result(20.0, 0.3))["perplexity"] == (20.0, False)


BAD = {
    "nothing to measure": (["eval", "MODEL"], "nothing to measure: give --text, --tasks or --recall"),
    "pairs without text": (["eval", "MODEL", "--tasks", "piqa", "--associative"], "give --text too"),
    "unknown task": (["eval", "MODEL", "--tasks", "arc_eazy"], "arc_easy"),
    "no task data": (["eval", "MODEL", "--tasks", "piqa", "--task-data", "EMPTY"], "piqa"),
    "hub out of reach": (["eval", "MODEL", "--recall"], "--task-data"),
    "window longer than the text": (["eval", "MODEL", "--text", "SHORT"], "fewer than a window of 1024: use --length"),
    "missing text": (["eval", "MODEL", "--text", "/nowhere/t.txt"], "no data at /nowhere/t.txt"),
    "other tokenizer": (["eval", "MODEL", "--text", "TEXT", "--baseline", "OTHER"], "have different tokenizers"),
    "other tokenizer, tasks": (
        ["eval", "MODEL", "--tasks", "piqa", "--baseline", "OTHER"], "have different tokenizers",
    ),
    "itself by another way": (
        ["eval", "MODEL", "--text", "TEXT", "--baseline", "MODEL/../delta_net-plain"], "the same model is given twice",
    ),
    "record is a folder": (["eval", "MODEL", "--text", "TEXT", "--out", "EMPTY"], "is a folder; --out is a file"),
    "empty tasks": (["eval", "MODEL", "--tasks", ""], "nothing to measure"),
    "limit": (["eval", "MODEL", "--tasks", "piqa", "--limit", "0"], "--limit 0: at least 1"),
    "seed": (["eval", "MODEL", "--text", "TEXT", "--seed", "-1"], "Invalid value for '--seed'"),
    "itself": (["eval", "MODEL", "--text", "TEXT", "--baseline", "MODEL"], "the same model is given twice"),
    "analyze: other tokenizer": (
        ["analyze", "MODEL", "OTHER", "--text", "TEXT", "--out", "OUT"], "different tokenizers",
    ),
    "analyze: short": (["analyze", "MODEL", "--text", "SHORT", "--out", "OUT"], "fewer than a window of 1024"),
    "analyze: stride": (["analyze", "MODEL", "--text", "TEXT", "--out", "OUT", "--every", "0"], "stride must lie"),
    "analyze: no text": (["analyze", "MODEL", "--out", "OUT"], "Missing option '--text'"),
    "analyze: skip": (["analyze", "MODEL", "--text", "TEXT", "--out", "OUT", "--skip", "5000"], "which are skipped"),
    "analyze: file": (["analyze", "MODEL", "--text", "TEXT", "--out", "TEXT"], "is a file"),
    "analyze: under a file": (["analyze", "MODEL", "--text", "TEXT", "--out", "TEXT/x"], "is a file"),
    "analyze: samples": (
        ["analyze", "MODEL", "--text", "TEXT", "--out", "OUT", "--samples", "1000"], "use fewer --samples than 1000",
    ),
    "analyze: head": (["analyze", "MODEL", "--text", "TEXT", "--out", "OUT", "--head", "9:0"], "layers are 0, 1"),
    "analyze: odd head": (["analyze", "MODEL", "--text", "TEXT", "--out", "OUT", "--head", "²:0"], "give LAYER:HEAD"),
    "sweep: file": (["sweep", "MODEL", "--text", "TEXT", "--out", "TEXT", "--methods", "l1"], "is a file"),
    "sweep: f": (
        ["sweep", "MODEL", "--text", "TEXT", "--out", "OUT", "--methods", "l1", "--rrqr-f", "0.5"], "f >= 1",
    ),
    "sweep: loss": (["sweep", "MODEL", "--text", "TEXT", "--out", "OUT", "--max-loss", "nan"], "--max-loss nan"),
    "sweep: window": (
        ["sweep", "MODEL", "--text", "SHORT", "--out", "OUT", "--methods", "l1"], "use --text-length 13",
    ),
    "sweep: compression": (
        ["sweep", "MODEL", "--text", "TEXT", "--out", "OUT", "--compressions", "0.5,2"], "compression 2.0",
    ),
    "sweep: words": (["sweep", "MODEL", "--text", "TEXT", "--out", "OUT", "--compressions", "half"], "give numbers"),
    "sweep: method": (["sweep", "MODEL", "--text", "TEXT", "--out", "OUT", "--methods", "magic"], "unknown method"),
    "sweep: score": (["sweep", "MODEL", "--text", "TEXT", "--out", "OUT", "--scores", "v"], "unknown score"),
    "sweep: no data": (["sweep", "MODEL", "--text", "TEXT", "--out", "OUT"], "give text to calibrate on with --data"),
    "sweep: short": (
        ["sweep", "MODEL", "--text", "SHORT", "--out", "OUT", "--methods", "l1"], "fewer than a window of 1024",
    ),
    "report: no folder": (["report", "/nowhere"], "no folder /nowhere"),
    "report: nothing there": (["report", "EMPTY"], "sweep"),
}  # fmt: skip


def _placed(argument, places):
    """With the place that its first part names."""
    name, slash, rest = argument.partition("/")
    return f"{places[name]}{slash}{rest}" if name in places else argument


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_gets_one_line_and_writes_nothing(name, folders, other, text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("slimstate.system.hub.reachable", lambda: False)
    arguments, message = BAD[name]
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("a short text")
    before = sorted(tmp_path.rglob("*"))
    places = {
        "MODEL": folders[NAME], "OTHER": other, "TEXT": text_file, "SHORT": tmp_path / "short.txt",
        "EMPTY": tmp_path / "empty", "OUT": tmp_path / "out",
    }  # fmt: skip
    code, out, err = run(capsys, monkeypatch, *(_placed(argument, places) for argument in arguments))
    last = err.splitlines()[-1]
    assert code == 2
    assert out == ""
    assert last.startswith("slimstate: ")
    assert message in last
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture(scope="module")
def other(folders, tmp_path_factory):
    """The same model with a tokenizer that has one token more."""
    folder = tiny.save(tiny.build(tiny.VARIANTS[NAME]), tmp_path_factory.mktemp("other") / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("unrendered")
def test_models_of_other_depths_and_names_with_dots_keep_their_figures(folders, text_file, tmp_path):
    """A hybrid beside a model of one layer: spectra of the heads that both have, and a figure for each name."""
    hybrid = tiny.save(tiny.build(tiny.VARIANTS["delta_net-hybrid"]), tmp_path / "net-1.3B")
    single = tiny.save(tiny.build(tiny.VARIANTS[NAME], num_hidden_layers=1), tmp_path / "net-1.3B-cut")
    out = tmp_path / "out"
    for head in ("0:0", "2:1"):
        options = AnalysisOptions(length=64, every=8, skip=0, head=head)
        slimstate.analyze([hybrid, single], text_file, out, options=options)
    assert {"filters-net-1.3B.png", "filters-net-1.3B-cut.png"} <= {path.name for path in out.iterdir()}


@pytest.mark.slow
def test_an_analysis_keeps_the_plan_of_a_cut_model_for_the_report(analysed, cut):
    made = slimstate.report(analysed)
    assert made.records["plan"] == 1
    page = (analysed / "report.html").read_text()
    assert "What was cut" in page
    assert str(cut) in page
