"""analyze and eval as people use them: records and figures, two models side by side, one line for bad input."""

import json
import re
import shlex
import statistics
from pathlib import Path

import pytest
import torch

import slimstate
import tiny
from slimstate.checkpoints.reader import Checkpoint
from slimstate.evaluation.measure import compare
from slimstate.models.load import load
from slimstate.records.evaluation import EvaluationRecord, LmEval, Result, TaskScores
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.reports.plots.states import utilisation_curves
from slimstate.reports.plots.style import label_of, svg
from slimstate.system.errors import OutputError

pytestmark = pytest.mark.slow
NAME = tiny.PLAIN[0]


@pytest.fixture(scope="module")
def cut(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("cut") / "slim"
    slimstate.prune(folders[NAME], out, method="l1", key_dim=8)
    return out


@pytest.fixture(scope="module")
def analysis(folders, cut, text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("analysis") / "records"
    result = slimstate.analyze([folders[NAME], cut], text_file, out, length=200, every=8, skip=40)
    assert [use.name for use in result.models] == [NAME, "slim"]
    assert set(map(Path, result.figures)) == set(out.iterdir()) - set(out.glob("*.json"))
    return out


def test_an_analysis_is_records_and_figures(analysis, folders, text_file):
    written = json.loads((analysis / f"trace-{NAME}.json").read_text())
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
    figures = {path.stem for path in analysis.glob("*.png")}
    assert figures == {path.stem for path in analysis.glob("*.pdf")}
    assert {"utilisation", "spectra", "spectrum", "utilisation-by-head", "retrieval-error"} < figures
    assert {f"filters-{NAME}", "filters-slim"} < figures


def test_differences_in_utilisation_have_errors_over_the_same_texts(folders, cut, text_file, tmp_path, succeed):
    words = ("--length", 64, "--skip", 16, "--samples", 3, "--out", tmp_path)
    output = succeed("analyze", folders[NAME], cut, "--text", text_file, *words)
    uncut, slim = (TraceRecord.read(tmp_path / f"trace-{name}.json") for name in (NAME, "slim"))
    pairs = zip(slim.utilisation_by_text, uncut.utilisation_by_text, strict=True)
    error = statistics.stdev(after - before for after, before in pairs) / 3**0.5
    over, expected = slim.utilisation_over(uncut), slim.mean_utilisation - uncut.mean_utilisation
    assert over == (pytest.approx(expected), pytest.approx(error))
    means = [statistics.fmean(each.utilisation_by_text) for each in (slim, uncut)]
    assert over[0] == pytest.approx(means[0] - means[1], rel=1e-3)
    assert f"± {error:.2g}" in output
    assert "standard error" not in output
    succeed("report", tmp_path, "--out", tmp_path / "page.html")
    assert f"± {error:.2g}" in (tmp_path / "page.html").read_text()
    words = ("--length", 64, "--skip", 16, "--out", tmp_path / "one")
    assert "one text is too few for a standard error" in succeed("analyze", cut, "--text", text_file, *words)


def test_records_of_another_analysis_are_replaced_only_by_force(folders, text_file, tmp_path):
    options = {"length": 64, "skip": 16}
    slimstate.analyze(folders[NAME], text_file, tmp_path, **options)
    path = tmp_path / f"trace-{NAME}.json"
    before = path.read_bytes()
    with pytest.raises(OutputError, match=f"{path} exists already; choose another folder or use `force`"):
        slimstate.analyze(folders[NAME], text_file, tmp_path, every=8, **options)
    assert path.read_bytes() == before
    slimstate.analyze(folders[NAME], text_file, tmp_path, every=8, force=True, **options)
    assert TraceRecord.read(path).every == 8


def test_filters_are_those_of_the_weights(analysis, folders):
    record = FiltersRecord.read(analysis / f"filters-{NAME}.json")
    weight = Checkpoint.open(folders[NAME]).read("model.layers.1.attn.k_conv1d.weight").squeeze(1).view(2, 24, 4)
    torch.testing.assert_close(torch.tensor(record.filters["1"]["key"]), weight, rtol=5e-3, atol=1e-3)
    unit = torch.nn.functional.normalize(weight[0], dim=-1)
    pairs = (unit @ unit.mT)[~torch.eye(24, dtype=torch.bool)]
    assert record.likeness["key"]["1"][0] == pytest.approx(float(pairs.mean()), abs=2e-3)


def test_a_figure_in_a_page_has_its_own_ids_and_the_colours_of_the_page(analysis):
    traces = [TraceRecord.read(path) for path in sorted(analysis.glob("trace-*.json"))]
    text = svg(utilisation_curves(traces), "curve")
    assert text.startswith("<svg")
    assert "var(--ink)" in text
    assert all(part.startswith("curve-") for part in text.split(' id="')[1:])
    assert label_of(traces[1]) in text


def test_eval_puts_two_models_side_by_side(folders, cut, text_file, tmp_path, succeed):
    record_file = tmp_path / "evaluation.json"
    measures = ("--text", text_file, "--length", 600, "--max-tokens", 1200, "--associative")
    assert "share kept" in succeed("eval", cut, *measures, "--baseline", folders[NAME], "--out", record_file)
    record = EvaluationRecord.read(record_file)
    alone = slimstate.evaluate(folders[NAME], text_file, length=600, max_tokens=1200)
    assert record.baseline.perplexity == alone.perplexity
    assert record.compared[0].share == pytest.approx(alone.perplexity / record.perplexity)
    units = ("perplexity", "bits per byte")
    assert [(row.measure, row.model, row.baseline) for row in record.compared[:2]] == [
        (unit, *(getattr(each, unit.replace(" ", "_")) for each in (record, alone))) for unit in units
    ]
    recall = ["associative recall", *(f"associative recall, {pairs} pairs" for pairs in (2, 4, 8, 16, 32))]
    assert [row.measure for row in record.compared[2:]] == recall
    assert record.digest.startswith("sha256:")
    assert record.versions["torch"]
    assert record.command.startswith("slimstate eval ")


def test_an_analysis_says_how_its_model_was_cut_and_keeps_the_plan_for_the_report(analysis, cut, folders, monkeypatch):
    monkeypatch.setattr("slimstate.reports.plots.style.svg", lambda figure, prefix: "<svg/>")  # painting takes seconds
    slim, uncut = (TraceRecord.read(analysis / f"trace-{name}.json") for name in ("slim", NAME))
    assert (slim.cut.method, slim.cut.score, slim.cut.key_dim, slim.cut.width) == ("l1", "kq", 8, 24)
    assert slim.cut.base_model == str(folders[NAME])
    assert uncut.cut is None
    assert slimstate.report(analysis).records["plan"] == 1
    page = (analysis / "report.html").read_text()
    assert "What was cut" in page
    assert str(cut) in page


def test_shares_of_accuracies_and_of_perplexities():
    def result(perplexity, accuracy):
        tasks = {"piqa": TaskScores(metrics={"acc": accuracy, "odd": None}, higher_is_better={"acc": True})}
        scores = LmEval(tasks=tasks, averages={"zero_shot": accuracy})
        return Result(name="a", model="a", perplexity=perplexity, lm_eval=scores)

    rows = compare(result(20.0, 0.3), result(10.0, 0.6))
    assert [row.measure for row in rows] == ["perplexity", "piqa acc", "zero-shot average"]
    assert [row.share for row in rows] == [0.5, 0.5, 0.5]
    assert compare(result(20.0, 0.3), result(10.0, 0.0))[1].share is None


BAD = [
    ("eval MODEL", "nothing to measure: give --text, --tasks or --recall"),
    ("eval MODEL --tasks piqa --associative", "give --text"),
    ("eval MODEL --tasks arc_eazy", "arc_easy"),
    ("eval MODEL --tasks piqa --task-data EMPTY", "piqa"),
    ("eval MODEL --recall", "--task-data"),  # the hub cannot be reached
    ("eval MODEL --text ''", "--text must not be empty"),  # a variable of the shell that is not set
    ("eval MODEL --text TEXT --baseline ''", "--baseline must not be empty"),
    ("eval MODEL --text SHORT", "fewer than a window of 1024: use --length"),
    ("eval MODEL --text /nowhere/t.txt", "no data at /nowhere/t.txt"),
    ("eval MODEL --text TEXT --baseline OTHER", "have different tokenizers"),
    ("eval MODEL --tasks piqa --baseline OTHER", "have different tokenizers"),
    ("eval MODEL --text TEXT --baseline MODEL", "models must differ, got the same one twice"),
    ("eval MODEL --text TEXT --baseline MODEL/../delta_net-plain", "models must differ, got the same one twice"),
    ("eval MODEL --text TEXT --out EMPTY", "is a folder; --out must be a file"),
    ("eval MODEL --tasks ''", "nothing to measure"),
    ("eval MODEL --tasks piqa --limit 0", "--limit must be at least 1, got 0"),
    ("eval MODEL --text TEXT --seed -1", "--seed must be at least 0, got -1"),
    ("eval MODEL --text TEXT --state-dtype int3", "unknown --state-dtype 'int3'"),
    ("sweep MODEL --text TEXT --methods l1 --state-dtypes int3 --out OUT", "unknown --state-dtypes 'int3'"),
    ("analyze MODEL OTHER --text TEXT --out OUT", "different tokenizers"),
    ("analyze MODEL --text SHORT --out OUT", "fewer than a window of 1024"),
    ("analyze MODEL --text TEXT --out OUT --every 0", "--every must be at least 1"),
    ("analyze MODEL --out OUT", "Missing option '--text'"),
    ("analyze MODEL --text TEXT --out OUT --skip 5000", "--skip must be at least 0 and less than the 1024 tokens"),
    ("analyze MODEL --text TEXT --out TEXT", "is a file"),
    ("analyze MODEL --text TEXT --out TEXT/x", "is a file"),
    ("analyze MODEL --text TEXT --out OUT --samples 1000", "use fewer --samples than 1000"),
    ("analyze MODEL --text TEXT --out OUT --head 9:0", "layers are 0, 1"),
    ("analyze MODEL --text TEXT --out OUT --head ²:0", "give LAYER:HEAD"),
    ("sweep MODEL --text TEXT --out TEXT --methods l1", "is a file"),
    ("sweep MODEL --text TEXT --out OUT --methods l1 --rrqr-f 0.5", "--rrqr-f must be at least 1, got 0.5"),
    ("sweep MODEL --text TEXT --out OUT --max-loss nan", "--max-loss must be finite, got nan"),
    ("sweep MODEL --text SHORT --out OUT --methods l1", "fewer than a window of 1024: use --text-length 13"),
    ("sweep MODEL --text TEXT --out OUT --compressions 0.5,2", "must lie between 0 and 1, got 2"),
    ("sweep MODEL --text TEXT --out OUT --compressions half", "--compressions must be a number, got 'half'"),
    ("sweep MODEL --text TEXT --out OUT --key-dims 89;76", "--key-dims must be a whole number, got '89;76'"),
    ("sweep MODEL --text TEXT --out OUT --methods magic", "unknown method"),
    ("sweep MODEL --text TEXT --out OUT --scores v", "unknown --scores v; there are kq, k, q"),
    ("sweep MODEL --text TEXT --out OUT", "give text to calibrate on with --data"),
    ("sweep MODEL --out OUT", "give it with --text"),
    ("sweep MODEL --text TEXT --out OUT --methods l1 --tasks wikitxt", "unknown task 'wikitxt'"),
    ("sweep MODEL --text TEXT --out OUT --methods l1 --tasks piqa --task-data EMPTY", "no data for task piqa"),
    ("sweep MODEL --text TEXT --out OUT --methods l1 --tasks piqa --limit 0", "--limit must be at least 1"),
    ("report /nowhere", "no folder /nowhere"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_input_is_one_line_and_no_output(line, message, folders, other, text_file, tmp_path, refusal, monkeypatch):
    monkeypatch.setattr("slimstate.system.hub.is_reachable", lambda: False)
    if "--tasks" in line:
        monkeypatch.setattr("slimstate.models.load.stock_class", None)  # refused before a model is loaded
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("a short text")
    before = sorted(tmp_path.rglob("*"))
    places = {"MODEL": folders[NAME], "OTHER": other, "TEXT": text_file, "SHORT": tmp_path / "short.txt"}
    places |= {"EMPTY": tmp_path / "empty", "OUT": tmp_path / "out"}
    words = [re.sub("^[A-Z]+", lambda match: str(places[match[0]]), word) for word in shlex.split(line)]
    assert message in refusal(*words)
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
        slimstate.analyze([hybrid, single], text_file, out, length=64, every=8, skip=0, head=head, force=True)
    assert {"filters-net-1.3B.png", "filters-net-1.3B-cut.png"} <= {path.name for path in out.iterdir()}
