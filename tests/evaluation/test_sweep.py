"""Sweeps: rows agree with real cuts, one calibration serves all, an interruption costs one row, tables show rows."""

import csv
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import slimstate
import tiny
from slimstate import SweepConfig
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.effective_rank import rank_utilisation, singular_values
from slimstate.core.evidence import EvidenceFile
from slimstate.evaluation import sweep as steps
from slimstate.evaluation.associative_recall import associative_recall, recall_change, recall_tokens
from slimstate.evaluation.options import GridOptions
from slimstate.evaluation.sweep import recommend
from slimstate.evaluation.sweep_grid import Grid
from slimstate.models.hooks import observed
from slimstate.models.load import load
from slimstate.records.evaluation import AssociativeRecall, RecallPoint, Row, SweepRecord, SweepSettings, Uncut
from slimstate.reports.tables import PER_TOKEN, task_metrics
from slimstate.system.errors import DataError, PlanError
from slimstate.workflows.sweep import command_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unrendered")]
NAME = tiny.PLAIN[0]
WINDOWS = {"text_length": 96, "max_tokens": 384}
SHORT = {"text_length": 96, "max_tokens": 192}
L1 = {"methods": ["l1"], "compressions": [0.5]}  # needs no text to calibrate on
COMPRESSIONS = (0.33, 0.7)


def calibration(path: Path) -> dict[str, object]:
    return {"data": path, "samples": 4, "length": 64}


@pytest.fixture
def sweep(folders, text_file):

    def call(out: Path, name: str = NAME, **options) -> SweepRecord:
        return slimstate.sweep(folders[name], out, progress=False, **{"text": text_file, **options})

    return call


@pytest.fixture(scope="module")
def measured(folders, text_file, tmp_path_factory):
    """One sweep of each family: its folder and its record."""
    root = tmp_path_factory.mktemp("sweeps")
    options = {"text": text_file, **calibration(text_file), **WINDOWS}
    options |= {"scores": ("kq", "k"), "compressions": COMPRESSIONS}
    sweeps = {name: slimstate.sweep(folders[name], root / name, **options) for name in tiny.PLAIN}
    return {name: (root / name, record) for name, record in sweeps.items()}


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_every_method_score_and_key_dim_is_a_row(name, measured):
    out, record = measured[name]
    assert record == SweepRecord.read(out / "sweep.json")
    methods = ("l1", "s-wanda", "grad", "drrqr", "drrqr-weighted")
    informed = {(method, score, "16") for method in methods for score in ("kq", "k")}
    assert {row.key[:3] for row in record.rows} == informed | {("random", "kq", "16")}  # both compressions round to 16
    assert math.fsum(record.uncut.window_nats) / 4 == pytest.approx(record.uncut.nats_per_token, rel=1e-12)
    for row in record.rows:
        assert row.nats_over_uncut == pytest.approx(row.nats_per_token - record.uncut.nats_per_token)
        assert row.nats_error > 0
        assert row.perplexity == pytest.approx(math.exp(row.nats_per_token))
        assert row.bits_per_byte == pytest.approx(row.nats_per_token * row.tokens / row.bytes / math.log(2), rel=1e-12)
        assert 0 < row.rank_utilisation <= 1
        assert row.kappa_worst >= row.kappa >= 1


@pytest.mark.parametrize("name", tiny.PLAIN)
@pytest.mark.parametrize("method", ["drrqr", "l1"])
def test_a_row_agrees_with_the_cut_model(name, method, measured, folders, text_file, tmp_path):
    """Prune from the sweep's evidence, reload, measure: the same perplexity, utilisation and condition numbers."""
    out, record = measured[name]
    row = next(row for row in record.rows if (row.method, row.score) == (method, "kq"))
    cut = tmp_path / "cut"
    slimstate.prune(folders[name], cut, method=method, key_dim=row.key_dim, evidence=out / "evidence.safetensors")
    evaluation = slimstate.evaluate(cut, text_file, length=96, max_tokens=384)
    # cut and mask differ by the other norms' epsilon, which random models feel: see the contract tests
    assert evaluation.nats_per_token == pytest.approx(row.nats_per_token, rel=2e-3)
    states, runtime = [], load(cut, device="cpu")
    ids = torch.tensor(runtime.tokenizer(text_file.read_text())["input_ids"][:384]).view(4, 96)
    mixers = Checkpoint.open(cut).mixers
    with torch.inference_mode(), observed(runtime.model, mixers, lambda reading: states.append(reading.state)):
        runtime.model(input_ids=ids[: steps.STATE_WINDOWS])
    utilisation = torch.stack([rank_utilisation(singular_values(state)) for state in states]).mean()
    assert row.rank_utilisation == pytest.approx(float(utilisation), rel=1e-2)
    if method == "drrqr":
        plan = json.loads((cut / "slimstate_plan.json").read_text())
        kappas = sorted(kappa for layer in plan["layers"].values() for kappa in layer["condition_after"])
        assert row.kappa == pytest.approx(kappas[len(kappas) // 2])
        assert row.kappa_worst == pytest.approx(kappas[-1])


def test_a_sweep_calibrates_once_and_loads_once(sweep, text_file, tmp_path, monkeypatch):
    functions = {
        "slimstate.pruning.evidence.calibrate": slimstate.pruning.calibration.calibrate,
        "slimstate.workflows.sweep.load": load,
        "slimstate.evaluation.sweep.window_nats": steps.window_nats,
    }
    calls = {place: Mock(wraps=function) for place, function in functions.items()}
    for place, call in calls.items():
        monkeypatch.setattr(place, call)
    record = sweep(tmp_path / "out", compressions=COMPRESSIONS, **calibration(text_file), **WINDOWS)
    assert [call.call_count for call in calls.values()] == [1, 1, len(record.rows) + 1]
    evidence = EvidenceFile.open(tmp_path / "out" / "evidence.safetensors")
    assert evidence.missing(frozenset({"gram", "input", "gradient"})) == frozenset()


def test_an_interrupted_sweep_continues(sweep, text_file, tmp_path, monkeypatch):
    options = {"compressions": [0.33], **calibration(text_file), **WINDOWS}
    whole = sweep(tmp_path / "whole", **options)
    evaluations, window_nats = [], steps.window_nats

    def stop_at_the_fourth(*args, **kwargs):
        evaluations.append(1)
        if len(evaluations) == 4:
            raise KeyboardInterrupt
        return window_nats(*args, **kwargs)

    monkeypatch.setattr(steps, "window_nats", stop_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path / "out", **options)
    assert len(json.loads((tmp_path / "out" / "sweep.json").read_text())["rows"]) == 2
    monkeypatch.setattr("slimstate.pruning.evidence.calibrate", None)  # the evidence is there
    assert sweep(tmp_path / "out", **options).rows == whole.rows
    assert len(evaluations) == 4 + len(whole.rows) - 2
    monkeypatch.setattr("slimstate.workflows.sweep.load", None)  # all rows are there: nothing to load
    assert sweep(tmp_path / "out", **options).rows == whole.rows


def test_a_sweep_continues_only_with_the_same_settings(sweep, text_file, tmp_path):
    """A copy of the text, and defaults that are given explicitly, are the same settings."""
    options = {"methods": ["l1"], "compressions": COMPRESSIONS, **calibration(text_file), **WINDOWS}
    sweep(tmp_path / "out", **options)
    for changes, settings in (({"seed": 1}, "calibration, seed"), (SHORT, "text")):
        with pytest.raises(DataError, match=rf"is a sweep with another {settings}: choose another `out`"):
            sweep(tmp_path / "out", **{**options, **changes})
    copy = tmp_path / "copy.txt"
    copy.write_text(text_file.read_text())
    again = {**options, "text": copy, "data": copy, "device": "cpu", "dtype": "float32"}
    assert len(sweep(tmp_path / "out", **again).rows) == 1


def test_rows_of_an_earlier_sweep_stay_and_are_in_the_config(sweep, tmp_path):
    """0.5 and 0.4 of 24 channels are both 16: the tables have one column for them."""
    for method, compression in (("random", 0.5), ("l1", 0.4)):
        record = sweep(tmp_path / "out", methods=[method], compressions=[compression], **SHORT)
    assert {(row.method, row.compression) for row in record.rows} == {("random", 0.4), ("l1", 0.4)}
    assert [row.kappa for row in record.rows] == [None, None]  # these methods need no data
    assert "--evidence" not in record.recommended.command
    assert (record.config["methods"], record.config["compressions"]) == (["l1", "random"], [0.4])
    assert (tmp_path / "out" / "sweep.md").read_text().splitlines()[0].count("40% compression") == 3


def test_a_sweep_has_its_own_evidence(tmp_path):
    for config in (
        lambda: SweepConfig.from_values({"evidence": tmp_path / "evidence"}),
        lambda: SweepConfig(calibration=slimstate.Calibration(evidence=tmp_path / "evidence")),
    ):
        with pytest.raises(PlanError, match="evidence"):
            config()


def test_a_damaged_sweep_is_refused_in_one_line(sweep, tmp_path):
    sweep(tmp_path, **L1, **SHORT)
    path = tmp_path / "sweep.json"
    whole = json.loads(path.read_text())
    damages = {"settings": [[]], "rows": [None, ["x"], [{}], [{"method": "l1"}]], "uncut": [None, {}]}
    for name, value in ((name, value) for name, values in damages.items() for value in values):
        path.write_text(json.dumps({**whole, name: value}))
        with pytest.raises(DataError, match="is not a sweep that can be continued"):
            sweep(tmp_path, **L1, **SHORT)


@pytest.mark.parametrize("name", [*tiny.PLAIN, "gla-plain", "olmo_hybrid-plain", "mamba2-plain"])
def test_a_sweep_that_keeps_the_norm_epsilon_agrees_with_such_a_cut(name, sweep, folders, text_file, tmp_path):
    """Also for families that correct the query scale in another way, cannot correct it, or have none."""
    record = sweep(tmp_path / "out", name, keep_norm_eps=True, **L1, **SHORT)
    (row,) = record.rows
    assert record.settings.keep_norm_eps
    for line in (record.command, record.recommended.command):
        assert "--keep-norm-eps" in line
    slimstate.prune(folders[name], tmp_path / "cut", method="l1", key_dim=row.key_dim, keep_norm_eps=True)
    evaluation = slimstate.evaluate(tmp_path / "cut", text_file, length=96, max_tokens=192)
    assert evaluation.nats_per_token == pytest.approx(row.nats_per_token, rel=2e-3)
    with pytest.raises(DataError, match="is a sweep with another keep_norm_eps"):
        sweep(tmp_path / "out", name, **L1, **SHORT)
    if name == NAME:  # whose epsilon is not small beside the output of the state
        assert sweep(tmp_path / "corrected", name, **L1, **SHORT).rows[0].nats_per_token != row.nats_per_token


def test_pairs_of_key_and_value_dims_are_swept_as_they_are_cut(sweep, folders, text_file, tmp_path):
    options = {"methods": ["drrqr"], "key_dims": [24, 8], "value_dims": [32, 16], **calibration(text_file), **WINDOWS}
    record = sweep(tmp_path / "out", text=text_file, **options)
    assert [row.dims for row in record.rows] == ["24 x 16", "8 x 32", "8 x 16"]
    assert [record.uncut.state_bytes / row.state_bytes for row in record.rows] == pytest.approx([2, 3, 6])
    with pytest.raises(DataError, match="another value_method"):
        sweep(tmp_path / "out", text=text_file, **options, value_method="l1")
    evidence = tmp_path / "out" / "evidence.safetensors"
    slimstate.prune(folders["delta_net-plain"], tmp_path / "cut", key_dim=8, value_dim=16, evidence=evidence)
    evaluation = slimstate.evaluate(tmp_path / "cut", text_file, length=96, max_tokens=384)
    assert evaluation.nats_per_token == pytest.approx(record.rows[-1].nats_per_token, rel=2e-3)


def test_key_dims_are_swept_exactly(sweep, tmp_path):
    """13 of 24 is no multiple of 16; the row has the share that it removes."""
    record = sweep(tmp_path / "out", methods=["l1"], key_dims=[16, 13, 8], **SHORT)
    assert [(row.key_dim, row.compression) for row in record.rows] == [(dim, 1 - dim / 24) for dim in (16, 13, 8)]
    assert "--methods l1 --key-dims 16,13,8" in record.command
    assert "45.8% compression (key dim 13)" in (tmp_path / "out" / "sweep.md").read_text()
    record = sweep(tmp_path / "out", methods=["l1"], key_dims=[13, 8], compressions=[0.5], **SHORT)
    assert (record.rows[0].key_dim, record.rows[0].compression) == (16, 0.5)  # which removes a third
    assert "--compressions 0.5 --key-dims 13,8" in record.command
    head = (tmp_path / "out" / "sweep.md").read_text().splitlines()[0]
    assert [head.count(f"(key dim {key_dim})") for key_dim in (8, 13, 16)] == [3, 3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["l1"], "key_dims": [24]}, "nothing to cut"),
        ({"methods": ["l1"], "key_dims": [0]}, "at least 1"),
        ({"methods": ["l1"], "key_dims": [25]}, "at least 1"),
        ({"compressions": []}, "one compression or key dim"),
        ({"methods": ["l1", "drrqr"]}, "drrqr need activations: give text to calibrate on with `data`"),
        ({"methods": ["l1"], "state_dtypes": ["bf16", "bf16"]}, "`state_dtypes`"),
        ({"text": None}, "give it with `text`"),
        ({"reconstruct": True}, "`reconstruct` trains on text: give it with `data`"),
    ],
)
def test_a_sweep_that_is_impossible_is_refused(options, message, sweep, tmp_path):
    with pytest.raises(PlanError, match=message):
        sweep(tmp_path / "out", **options)


def test_the_default_grid_is_that_of_the_paper():
    assert Grid.of(GridOptions(), 1000).key_dims == {704: 0.3, 608: 0.4, 496: 0.5, 256: 0.75}
    assert Grid.of(GridOptions(key_dims=(89, 76)), 128).key_dims == {89: 1 - 89 / 128, 76: 1 - 76 / 128}


def test_lines_in_rows_are_swept_as_the_file_they_are(sweep, text_file, tmp_path):
    rows, lines = tmp_path / "rows.jsonl", text_file.read_text().split("\n")[:-1]
    (tmp_path / "text.txt").write_text("".join(f"{line}\n" for line in lines))
    rows.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    whole = sweep(tmp_path / "out", text=tmp_path / "text.txt", **L1, **SHORT)
    again = sweep(tmp_path / "out", text=rows, documents="file", **L1, **SHORT)
    assert again.rows == whole.rows
    assert "--documents file" in again.command
    assert (whole.settings.text.documents, again.settings.text.documents) == ("file", "file")
    with pytest.raises(DataError, match="another text"):
        sweep(tmp_path / "out", text=rows, **L1, **SHORT)


def sweep_record(*rows: tuple[str, int, str, int, float]) -> SweepRecord:
    """Return a record of rows by method, key dim, data type, bytes and loss; uncut, the state has 1280 bytes."""
    uncut = Uncut(key_dim=128, state_bytes=1280, perplexity=20.0, rank_utilisation=0.5, nats_per_token=3.0)
    entries = tuple(
        Row(method=method, score="kq", compression=1 - key_dim / 128, key_dim=key_dim, state_dtype=state_dtype,
            state_bytes=size, nats_over_uncut=loss, nats_per_token=3 + loss)
        for method, key_dim, state_dtype, size, loss in rows
    )  # fmt: skip
    return SweepRecord(model="MODEL", width=128, rows=entries, uncut=uncut, settings=SweepSettings(seed=0, f=1.5))


CUTS = sweep_record(
    ("l1", 64, "float32", 640, 0.09), ("grad", 64, "float32", 640, 0.02), ("grad", 32, "float32", 320, 0.3),
    ("drrqr", 96, "float32", 960, 0.01),
)  # fmt: skip
STORED = sweep_record(
    ("uncut", 128, "bfloat16", 640, 0.001), ("l1", 64, "float32", 640, 0.09), ("l1", 64, "bfloat16", 320, 0.2),
    ("uncut", 128, "float8_e4m3", 322, 0.02),
)  # fmt: skip


@pytest.mark.parametrize(
    ("record", "max_loss", "row", "reason", "command"),
    [
        (CUTS, 0.1, 1, "50% less state for +0.020 nats", "slimstate prune MODEL --out SLIM --key-dim 64 --method grad"),
        (CUTS, 0.001, 3, "no cut stays within 0.001 nats", "slimstate prune"),
        (STORED, 0.1, 0, "no cut, states stored in bfloat16: 50% less state for +0.001 nats",
         "vllm serve MODEL --mamba-ssm-cache-dtype bfloat16"),
        (STORED, 0.3, 2, "75% less state", "slimstate prune MODEL --out SLIM --key-dim 64"),
        (STORED, 0.0001, 0, "nothing stays within 0.0001 nats", "vllm serve"),
    ],
)  # fmt: skip
def test_the_recommended_row_has_the_smallest_state_within_the_loss(record, max_loss, row, reason, command):
    """Data types are recommended where engines support them."""
    best = recommend(record, max_loss, lambda row: command_for(row, "MODEL", Path("out"), SweepConfig()))
    assert (best.row, best.within) == (row, "stays within" not in reason)
    assert reason in best.reason
    assert ("one window gives no standard error" in best.reason) == (record.rows[row].method != "uncut")
    assert best.command.startswith(command)
    assert STORED.front == (0, 2, 3)


def test_controls_are_never_recommended_and_equal_losses_mean_the_smaller_state():
    def best(*rows, error=None):
        record = sweep_record(*rows)
        rows = tuple(replace(row, nats_error=error) for row in record.rows)
        return recommend(replace(record, rows=rows), 0.1, lambda row: row.method)

    control, wide, narrow = (
        (method, key_dim, "float32", 10 * key_dim, loss)
        for method, key_dim, loss in (("random", 32, -0.003), ("drrqr", 64, 0.2), ("l1", 48, 0.21))
    )
    assert best(control).command is None
    assert "only controls were measured" in best(control).reason
    assert best(control, wide, narrow, error=0.001).command == "drrqr"
    assert best(control, wide, narrow, error=0.01).command == "l1"
    assert "loss, within its error, is l1 at key dim 48: 62% less" in best(control, wide, narrow, error=0.01).reason
    beside = ("random", 64, "float32", 640, 0.15)
    assert "; the control random loses less, +0.150" in best(beside, wide, error=0.01).reason
    assert "the control" not in best(beside, wide, error=0.1).reason, "within two standard errors"


def test_recall_and_the_score_of_a_function_are_those_of_the_cut_and_are_recommended_with_their_errors(
    sweep, folders, text_file, tmp_path, monkeypatch
):  # fmt: skip
    monkeypatch.setattr("slimstate.evaluation.associative_recall.MIN_QUESTIONS", 8)

    def norms(model, tokenizer) -> dict[str, float]:
        return {"vocabulary": len(tokenizer), "layers": model.config.num_hidden_layers}

    options = {"recall": 2, "score": norms, "methods": ["l1"], "key_dims": [8], **SHORT}
    record = sweep(tmp_path / "out", **options)
    (row,), uncut = record.rows, record.uncut
    slimstate.prune(folders[NAME], tmp_path / "cut", method="l1", key_dim=8)
    cut = associative_recall(load(tmp_path / "cut", device="cpu"), str(text_file), sequences=2)
    assert cut.digest == row.associative_recall.digest  # the same sequences
    assert cut.mean == pytest.approx(row.associative_recall.mean, abs=0.05)
    assert [len(point.shares) for point in cut.points] == [4, 2, 2, 2, 2]
    change = row.associative_recall.mean - uncut.associative_recall.mean
    assert row.recall_over_uncut == pytest.approx(change)
    assert row.user_scores == uncut.user_scores == {"vocabulary": 258, "layers": 2}
    assert record == SweepRecord.read(tmp_path / "out" / "sweep.json")
    assert record.to_dataframe()["layers"].tolist() == [2, 2]
    titles = ["associative recall ↑", "vocabulary", "layers"]
    assert [metric.title for metric in task_metrics(record)] == titles
    for other, message in (({"recall": 0}, "another recall"), ({"score": None}, "another function")):
        with pytest.raises(DataError, match=message):
            sweep(tmp_path / "out", **{**options, **other})
    for result in ("good", {}, float("nan")):
        with pytest.raises(DataError, match="`score` must return a finite number"):
            steps._named(result, "score")
    for name in ("perplexity", "a|b"):
        with pytest.raises(DataError, match="a name that is a column of the sweep"):
            steps._named({name: 1.0}, None)
    lost = replace(row, recall_over_uncut=-0.2, recall_error=0.05)
    for each, words in ((lost, "falls from"), (replace(lost, recall_error=0.1), "± 0.1 (no difference)")):
        assert words in recommend(replace(record, rows=(each,)), 0.1, lambda row: "").reason


def test_recall_is_measured_where_it_reads_fewer_tokens_than_the_text():
    """Sequences ask 64 questions at least: 32, 16, 8, 8 and 8 of them for 2, 4, 8, 16 and 32 pairs."""
    assert recall_tokens() == 512 * (32 + 16 + 8 + 8 + 8)
    points = [RecallPoint(pairs=2, accuracy=0.5, shares=shares) for shares in ((1, 0, 0, 1), (1, 1, 1, 1))]
    first, second = (AssociativeRecall(points=(point,), mean=sum(point.shares) / 4, candidates=64) for point in points)
    assert recall_change(first, second) == (-0.5, pytest.approx(math.sqrt(1 / 3 / 4)))


def cells_of(table: str) -> dict[str, list[str]]:
    """Return the cells of a Markdown or LaTeX table without marks, by the first cell of each line."""
    lines = [line for line in table.splitlines() if "|" in line or "&" in line]
    rows = [[re.sub(r"\*\*|</?u>|\\\w+\{|[{}\\]", "", cell).strip() for cell in re.split(r"[|&]", line) if cell.strip()] for line in lines]  # noqa: E501  # fmt: skip
    return {row[0]: row[1:] for row in rows}


def test_tables_show_the_rows(measured):
    out, record = measured[NAME]
    parsed = list(csv.DictReader((out / "sweep.csv").open()))
    for name in ("perplexity", "bits_per_byte"):
        assert [float(row[name]) for row in parsed] == [getattr(row, name) for row in record.rows]
    keys = [(row["method"], row["score"], row["key_dim"], row["state_dtype"]) for row in parsed]
    assert keys == [row.key for row in record.rows]
    assert {(row["tokens"], row["bytes"]) for row in parsed} == {(str(record.uncut.tokens), str(record.uncut.bytes))}
    joint = {row.method: row for row in record.rows if row.score == "kq"}
    best = min(record.rows, key=lambda row: row.perplexity)
    for name, mark in (("sweep.md", "**"), ("sweep.tex", r"\textbf{")):
        text = (out / name).read_text()
        assert f"{mark}{PER_TOKEN.format(best.perplexity)}" in text
        assert "Perplexity is per token, not per word" in text
        cells = cells_of(text)
        assert cells["DRRQR"][0] == PER_TOKEN.format(joint["drrqr"].perplexity)
        assert cells["Baseline"][0] == PER_TOKEN.format(record.uncut.perplexity)
    assert (out / "sweep.tex").read_text().count(r"\multicolumn") == 1
    by_keys = next(row for row in record.rows if (row.method, row.score) == ("grad", "k"))
    assert cells["Grad by K"][0] == PER_TOKEN.format(by_keys.perplexity)
    expected = [PER_TOKEN.format(row.perplexity) for row in (joint["grad"], by_keys)]
    assert cells_of((out / "ablation.md").read_text())["Grad"] == expected
    assert "Rand" not in (out / "ablation.tex").read_text()
    assert (out / "pareto.png").stat().st_size > 10_000


def test_a_sweep_with_reconstruction_agrees_with_the_recommended_command(sweep, folders, text_file, tmp_path, succeed):
    """The row has the perplexity of the model that `prune --reconstruct` writes."""
    options = {"methods": ["drrqr"], "key_dims": [8], **calibration(text_file), **SHORT}
    training = {"steps": 3, "batch": 2, "samples": 6, "length": 32, "learning_rate": 3e-3}
    reconstruct = {"reconstruct": True, **{f"reconstruct_{name}": value for name, value in training.items()}}
    record = sweep(tmp_path / "sweep", "delta_net-plain", **options, **reconstruct)
    plain = sweep(tmp_path / "plain", "delta_net-plain", **options)
    assert record.rows[0].nats_per_token != plain.rows[0].nats_per_token
    left = tmp_path / "again" / "candidates" / "drrqr-kq-8"  # by a sweep with other steps
    other = {"key_dim": 8, "data": text_file, **reconstruct, "reconstruct_steps": 1}
    slimstate.prune(folders["delta_net-plain"], left, **other)
    again = sweep(tmp_path / "again", "delta_net-plain", **options, **reconstruct)
    assert again.rows[0].nats_per_token == record.rows[0].nats_per_token
    assert "--reconstruct --reconstruct-steps 3" in record.recommended.command
    assert not (tmp_path / "sweep" / "candidates").exists()
    _, *words = shlex.split(record.recommended.command.replace("SLIM", str(tmp_path / "cut")))
    succeed(*words)
    evaluation = slimstate.evaluate(tmp_path / "cut", text_file, length=96, max_tokens=192)
    assert evaluation.nats_per_token == pytest.approx(record.rows[0].nats_per_token, abs=1e-6)
    with pytest.raises(DataError, match="another reconstruct"):
        sweep(tmp_path / "sweep", "delta_net-plain", **options)


def test_data_types_are_swept_alone_and_with_every_cut(sweep, folders, text_file, tmp_path, monkeypatch):
    """Rows agree with `evaluate` of the cut; a sweep of cuts alone continues with another data type."""
    model, options = "gated_deltanet-plain", {"methods": ["l1"], "key_dims": [8], **SHORT}
    alone = sweep(tmp_path / "out", model, **options)
    calls, window_nats = [], steps.window_nats
    monkeypatch.setattr(steps, "window_nats", lambda *args: calls.append(1) or window_nats(*args))
    both = sweep(tmp_path / "out", model, state_dtypes=["float32", "bf16"], **options)
    assert len(calls) == 2
    width = both.width
    keys = [("uncut", "kq", str(width), "bfloat16"), ("l1", "kq", "8", "float32"), ("l1", "kq", "8", "bfloat16")]
    assert [row.key for row in both.rows] == keys
    assert both.rows[1] == alone.rows[0]
    assert [both.uncut.state_bytes // row.state_bytes for row in both.rows] == [2, width // 8, 2 * width // 8]
    assert "--state-dtypes float32,bfloat16" in both.command
    slimstate.prune(folders[model], tmp_path / "cut", method="l1", key_dim=8)
    for folder, row, tolerance in ((folders[model], both.rows[0], 1e-7), (tmp_path / "cut", both.rows[2], 2e-3)):
        evaluation = slimstate.evaluate(folder, text_file, length=96, max_tokens=192, state_dtype="bfloat16")
        assert evaluation.nats_per_token == pytest.approx(row.nats_per_token, rel=tolerance)
        assert (evaluation.state_dtype, evaluation.state_bytes) == ("bfloat16", row.state_bytes)
    assert SweepRecord.read(tmp_path / "out" / "sweep.json") == both
