"""Sweeps: rows that real cuts confirm, one calibration, a stop that costs one row, and tables that say the same."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from slimstate.evaluation.evaluate import EvalOptions

import slimstate
import tiny
from command import run
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.effective_rank import rank_utilisation, singular_values
from slimstate.core.evidence import EvidenceFile
from slimstate.evaluation import sweep as sweeps
from slimstate.evaluation.sweep import SweepOptions
from slimstate.evaluation.sweep import sweep as verb
from slimstate.evaluation.sweep_grid import SweepGrid
from slimstate.evaluation.sweep_results import recommend
from slimstate.models.hooks import observed
from slimstate.models.load import load
from slimstate.models.options import RunOptions
from slimstate.pruning.options import Calibration
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.records.sweep import Row, SweepRecord, SweepSettings, Uncut
from slimstate.report.tables import PER_WORD
from slimstate.system.errors import DataError, PlanError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unrendered")]

OPTIONS = SweepOptions(text_length=96, max_tokens=384)
SHORT = SweepOptions(text_length=96, max_tokens=192)
COMPRESSIONS = (0.33, 0.7)
NATS = sweeps.mean_nats
WITHOUT_DATA = SweepGrid(methods=("l1",), compressions=(0.5,))


def calibration(path, **more) -> Calibration:
    return Calibration(data=str(path), samples=4, length=64, **more)


@pytest.fixture(scope="module")
def measured_sweeps(folders, text_file, tmp_path_factory):
    """One sweep of each family: (folder of the model, folder of the sweep, record)."""
    root = tmp_path_factory.mktemp("sweeps")
    return {
        name: (
            folders[name],
            root / name,
            verb(
                folders[name],
                root / name,
                text=text_file,
                calibration=calibration(text_file),
                grid=SweepGrid(compressions=COMPRESSIONS, scores=("kq", "k")),
                options=OPTIONS,
            ),
        )
        for name in tiny.PLAIN
    }


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_every_method_score_and_key_dim_is_a_row(name, measured_sweeps):
    _, out, record = measured_sweeps[name]
    assert record == SweepRecord.read(out / "sweep.json")
    found = {row.key[:3] for row in record.rows}
    methods = ("l1", "s-wanda", "grad", "drrqr", "drrqr-weighted")
    informed = {(method, score, 16) for method in methods for score in ("kq", "k")}
    assert found == informed | {("random", "kq", 16)}  # both compressions of 24 channels round to 16
    for row in record.rows:
        assert row.nats_over_uncut == pytest.approx(row.nats_per_token - record.uncut.nats_per_token)
        assert row.perplexity == pytest.approx(math.exp(row.nats_per_token))
        assert row.word_perplexity == pytest.approx(math.exp(row.nats_per_token * row.tokens / row.words), rel=1e-12)
        assert row.bits_per_byte == pytest.approx(row.nats_per_token * row.tokens / row.bytes / math.log(2), rel=1e-12)
        assert 0 < row.rank_utilisation <= 1
        assert row.kappa_worst >= row.kappa >= 1


@pytest.mark.parametrize("name", tiny.PLAIN)
@pytest.mark.parametrize("method", ["drrqr", "l1"])
def test_a_row_is_what_the_cut_model_gives(name, method, measured_sweeps, text_file, tmp_path):
    """Prune for real from the sweep's evidence, reload, measure: the same perplexity and utilisation."""
    model, out, record = measured_sweeps[name]
    row = next(row for row in record.rows if (row.method, row.score) == (method, "kq"))
    cut = tmp_path / "cut"
    slimstate.prune(model, cut, method=method, key_dim=row.key_dim, evidence=out / "evidence.safetensors")
    measured = slimstate.evaluate(cut, text_file, options=EvalOptions(length=96, max_tokens=384))
    # cut and mask differ by the other norms' epsilon, which random models feel: see the contract tests
    assert measured.nats_per_token == pytest.approx(row.nats_per_token, rel=2e-3)
    states, runtime = [], load(cut, device="cpu")
    ids = torch.tensor(runtime.tokenizer(text_file.read_text())["input_ids"][:384]).view(4, 96)
    mixers = Checkpoint.open(cut).mixers
    with torch.inference_mode(), observed(runtime.model, mixers, lambda reading: states.append(reading.state)):
        runtime.model(input_ids=ids[: sweeps.STATES_OF])
    utilisation = torch.stack([rank_utilisation(singular_values(state)) for state in states]).mean()
    assert row.rank_utilisation == pytest.approx(float(utilisation), rel=1e-2)


def test_the_condition_of_the_kept_keys_is_that_of_the_plan(measured_sweeps, tmp_path):
    model, out, record = measured_sweeps[tiny.PLAIN[0]]
    row = next(row for row in record.rows if (row.method, row.score) == ("drrqr", "kq"))
    cut = tmp_path / "cut"
    slimstate.prune(model, cut, method="drrqr", key_dim=16, evidence=out / "evidence.safetensors")
    plan = json.loads((cut / "slimstate_plan.json").read_text())
    kappas = sorted(kappa for layer in plan["layers"].values() for kappa in layer["condition_after"])
    assert row.kappa == pytest.approx(kappas[len(kappas) // 2])
    assert row.kappa_worst == pytest.approx(kappas[-1])


def test_a_sweep_calibrates_once_and_loads_once(folders, text_file, tmp_path, monkeypatch):
    calls = {"calibrate": 0, "load": 0, "nats": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(
        "slimstate.pruning.evidence.calibrate", counted("calibrate", slimstate.pruning.calibration.calibrate)
    )
    monkeypatch.setattr(sweeps, "load", counted("load", sweeps.load))
    monkeypatch.setattr(sweeps, "mean_nats", counted("nats", sweeps.mean_nats))
    grid = SweepGrid(compressions=COMPRESSIONS)
    asked = {"text": text_file, "calibration": calibration(text_file), "grid": grid, "options": OPTIONS}
    record = verb(folders[tiny.PLAIN[0]], tmp_path / "out", **asked)
    assert calls == {"calibrate": 1, "load": 1, "nats": len(record.rows) + 1}
    held = EvidenceFile.open(tmp_path / "out" / "evidence.safetensors")
    assert held.missing(frozenset({"gram", "input", "gradient"})) == frozenset()


def test_a_stopped_sweep_goes_on_where_it_was(folders, text_file, tmp_path, monkeypatch):
    grid = SweepGrid(compressions=(0.33,))
    options = {"text": text_file, "calibration": calibration(text_file), "grid": grid, "options": OPTIONS}
    whole = verb(folders[tiny.PLAIN[0]], tmp_path / "whole", **options)
    evaluations = []

    def stop_at_the_fourth(*args, **kwargs):
        evaluations.append(1)
        if len(evaluations) == 4:
            raise KeyboardInterrupt
        return nats(*args, **kwargs)

    nats = sweeps.mean_nats
    monkeypatch.setattr(sweeps, "mean_nats", stop_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        verb(folders[tiny.PLAIN[0]], tmp_path / "out", **options)
    assert len(json.loads((tmp_path / "out" / "sweep.json").read_text())["rows"]) == 2
    monkeypatch.setattr("slimstate.pruning.evidence.calibrate", None)  # the evidence is there
    resumed = verb(folders[tiny.PLAIN[0]], tmp_path / "out", **options)
    assert len(evaluations) == 4 + len(whole.rows) - 2
    assert resumed.rows == whole.rows
    monkeypatch.setattr(sweeps, "load", None)  # all rows are there: nothing to load
    assert verb(folders[tiny.PLAIN[0]], tmp_path / "out", **options).rows == whole.rows


def test_a_sweep_with_other_settings_is_not_mixed_in(folders, text_file, tmp_path):
    options = {"text": text_file, "grid": SweepGrid(methods=("l1",), compressions=COMPRESSIONS), "options": OPTIONS}
    given = calibration(text_file)
    verb(folders[tiny.PLAIN[0]], tmp_path / "out", calibration=given, **options)
    with pytest.raises(DataError, match=r"another calibration, seed: choose another `out`"):
        verb(folders[tiny.PLAIN[0]], tmp_path / "out", calibration=calibration(text_file, seed=1), **options)
    with pytest.raises(DataError, match="another text"):
        verb(folders[tiny.PLAIN[0]], tmp_path / "out", calibration=given, **{**options, "options": SHORT})


def test_a_text_elsewhere_with_the_same_tokens_is_the_same_text(folders, text_file, tmp_path):
    options = {"grid": SweepGrid(methods=("l1",), compressions=COMPRESSIONS), "options": OPTIONS}
    verb(folders[tiny.PLAIN[0]], tmp_path / "out", text=text_file, calibration=calibration(text_file), **options)
    copy = tmp_path / "copy.txt"
    copy.write_text(text_file.read_text())
    again = {**options, "calibration": calibration(copy), "run": RunOptions(device="cpu", dtype="float32")}
    assert len(verb(folders[tiny.PLAIN[0]], tmp_path / "out", text=copy, **again).rows) == 1


def test_rows_of_an_earlier_sweep_stay_and_are_in_the_command(folders, text_file, tmp_path):
    """0.5 and 0.4 of 24 channels are both 16: the tables have one column for them."""
    grids = [SweepGrid(methods=(method,), compressions=(share,)) for method, share in (("random", 0.5), ("l1", 0.4))]
    for grid in grids:
        record = verb(folders[tiny.PLAIN[0]], tmp_path / "out", text=text_file, grid=grid, options=SHORT)
    assert {(row.method, row.compression) for row in record.rows} == {("random", 0.4), ("l1", 0.4)}
    assert "--methods l1,random --compressions 0.4 --scores kq" in record.command
    assert (tmp_path / "out" / "sweep.md").read_text().splitlines()[0].count("40% compression") == 3


def test_a_sweep_that_0_1_wrote_goes_on(folders, text_file, tmp_path):
    """It has no format number, no seed of its own beside the settings, and nothing where nothing was found."""
    options = {"text": text_file, "options": SHORT}
    verb(folders[tiny.PLAIN[0]], tmp_path, grid=WITHOUT_DATA, **options)
    path = tmp_path / "sweep.json"
    whole = SweepRecord.read(path)
    old = {name: value for name, value in json.loads(path.read_text()).items() if name not in ("format", "seed")}
    for measured in (old["uncut"], *old["rows"]):
        for name in ("word_perplexity", "bits_per_byte", "tokens", "words", "bytes", "lm_eval"):
            del measured[name]
    for name in ("keep_norm_eps", "tasks", "limit"):
        del old["settings"][name]
    path.write_text(json.dumps(old))
    found = verb(folders[tiny.PLAIN[0]], tmp_path, grid=replace(WITHOUT_DATA, methods=("random", "l1")), **options)
    assert [row.method for row in found.rows] == ["random", "l1"]
    assert found.rows[1:] == whole.rows  # in all units again
    assert found.uncut == whole.uncut


def test_evidence_of_another_place_is_not_taken_for_that_of_the_sweep(folders, text_file, tmp_path):
    elsewhere = replace(calibration(text_file), evidence=tmp_path / "elsewhere.safetensors")
    with pytest.raises(PlanError, match="keeps its evidence in `out`"):
        verb(folders[tiny.PLAIN[0]], tmp_path / "out", text=text_file, calibration=elsewhere)


@pytest.mark.parametrize(
    "damage",
    [
        {"settings": []},
        {"rows": None},
        {"rows": ["x"]},
        {"rows": [{}]},
        {"rows": [{"method": "l1"}]},
        {"uncut": None},
        {"uncut": {}},
    ],
)
def test_a_damaged_sweep_is_refused_in_words(damage, folders, text_file, tmp_path):
    options = {"text": text_file, "grid": WITHOUT_DATA, "options": SHORT}
    verb(folders[tiny.PLAIN[0]], tmp_path, **options)
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.raises(DataError, match="is not a sweep that can go on"):
        verb(folders[tiny.PLAIN[0]], tmp_path, **options)


@pytest.mark.parametrize("name", [*tiny.PLAIN, "gla-plain", "olmo_hybrid-plain", "mamba2-plain"])
def test_a_sweep_that_keeps_the_norm_epsilon_says_what_such_a_cut_gives(name, folders, text_file, tmp_path):
    """Also of families that make up for the query scale in another way, cannot, or have none."""
    options = replace(SHORT, keep_norm_eps=True)
    record = verb(folders[name], tmp_path / "out", text=text_file, grid=WITHOUT_DATA, options=options)
    (row,) = record.rows
    assert record.settings.keep_norm_eps
    for line in (record.command, record.recommended.command):
        assert "--keep-norm-eps" in line
    cut = tmp_path / "cut"
    slimstate.prune(folders[name], cut, method="l1", key_dim=row.key_dim, keep_norm_eps=True)
    measured = slimstate.evaluate(cut, text_file, options=EvalOptions(length=96, max_tokens=192))
    assert measured.nats_per_token == pytest.approx(row.nats_per_token, rel=2e-3)
    with pytest.raises(DataError, match="is a sweep with another keep_norm_eps"):
        verb(folders[name], tmp_path / "out", text=text_file, grid=WITHOUT_DATA, options=SHORT)


def test_keeping_the_norm_epsilon_is_another_model(folders, text_file, tmp_path):
    """Where it is small beside what the state gives out both would be the same: here it is not."""
    found = [
        verb(folders[tiny.PLAIN[0]], tmp_path / str(keep), text=text_file, grid=WITHOUT_DATA,
             options=replace(SHORT, keep_norm_eps=keep)).rows[0].nats_per_token
        for keep in (False, True)
    ]  # fmt: skip
    assert found[0] != found[1]


def test_key_dims_are_swept_as_they_are(folders, text_file, tmp_path):
    """13 of 24 is no multiple of 16; the row says which share that removes."""
    grid = SweepGrid(methods=("l1",), key_dims=(13, 8))
    record = verb(folders[tiny.PLAIN[0]], tmp_path / "out", text=text_file, grid=grid, options=SHORT)
    assert [(row.key_dim, row.compression) for row in record.rows] == [(13, 1 - 13 / 24), (8, 1 - 8 / 24)]
    assert "--methods l1 --key-dims 13,8 --scores kq" in record.command
    assert "45.8% compression (key dim 13)" in (tmp_path / "out" / "sweep.md").read_text()
    both = replace(grid, compressions=(0.5,))  # which is key dim 16, and removes a third
    record = verb(folders[tiny.PLAIN[0]], tmp_path / "out", text=text_file, grid=both, options=SHORT)
    assert (record.rows[0].key_dim, record.rows[0].compression) == (16, 0.5)
    assert "--compressions 0.5 --key-dims 13,8" in record.command
    head = (tmp_path / "out" / "sweep.md").read_text().splitlines()[0]
    assert [head.count(f"(key dim {key_dim})") for key_dim in (8, 13, 16)] == [3, 3, 3]


@pytest.mark.parametrize(
    ("key_dims", "message"), [((24,), "nothing to cut"), ((0,), "at least 1"), ((25,), "at least 1")]
)
def test_key_dims_that_are_no_cut_are_refused(key_dims, message, folders, text_file, tmp_path):
    with pytest.raises(PlanError, match=message):
        verb(
            folders[tiny.PLAIN[0]], tmp_path / "out", text=text_file, grid=SweepGrid(methods=("l1",), key_dims=key_dims)
        )


def test_a_grid_without_a_size_is_that_of_the_paper():
    assert SweepGrid().shares == (0.3, 0.4, 0.5, 0.75)
    assert SweepGrid(key_dims=(89, 76)).resolve(128) == {89: 1 - 89 / 128, 76: 1 - 76 / 128}
    with pytest.raises(PlanError, match="one compression or key dim"):
        SweepGrid(compressions=())


def test_a_text_of_lines_in_rows_is_swept_as_the_file_it_is(folders, text_file, tmp_path):
    rows = tmp_path / "rows.jsonl"
    lines = text_file.read_text().split("\n")[:-1]
    (tmp_path / "text.txt").write_text("".join(f"{line}\n" for line in lines))
    rows.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    asked = {"grid": WITHOUT_DATA, "options": SHORT}
    whole = verb(folders[tiny.PLAIN[0]], tmp_path / "out", text=tmp_path / "text.txt", **asked)
    again = verb(
        folders[tiny.PLAIN[0]], tmp_path / "out", text=rows, grid=WITHOUT_DATA, options=replace(SHORT, documents="file")
    )
    assert again.rows == whole.rows
    assert "--documents file" in again.command
    assert (whole.settings.text.documents, again.settings.text.documents) == ("file", "file")
    with pytest.raises(DataError, match="another text"):
        verb(folders[tiny.PLAIN[0]], tmp_path / "out", text=rows, **asked)


def test_methods_without_data_need_none(folders, text_file, tmp_path):
    grid = replace(WITHOUT_DATA, methods=("random", "l1"))
    record = verb(folders[tiny.PLAIN[0]], tmp_path / "out", text=text_file, grid=grid, options=SHORT)
    assert [row.kappa for row in record.rows] == [None, None]
    assert "--evidence" not in record.recommended.command
    with pytest.raises(PlanError, match="drrqr look at activations"):
        verb(folders[tiny.PLAIN[0]], tmp_path / "two", text=text_file, grid=SweepGrid(methods=("l1", "drrqr")))


def test_the_recommended_point_is_the_smallest_state_within_the_loss():
    def row(method, key_dim, loss):
        return Row(
            method=method, score="kq", compression=1 - key_dim / 128, key_dim=key_dim, state_bytes=key_dim * 10,
            nats_over_uncut=loss,
        )  # fmt: skip

    record = SweepRecord(
        model="MODEL",
        width=128,
        rows=(row("l1", 64, 0.09), row("grad", 64, 0.02), row("grad", 32, 0.3), row("drrqr", 96, 0.01)),
        uncut=Uncut(key_dim=128, state_bytes=1280, perplexity=10.0, rank_utilisation=0.5),
        settings=SweepSettings(seed=0, f=1.5),
    )
    chosen = recommend(record, 0.1, Path("out"), "MODEL")
    assert (chosen.row, chosen.within) == (1, True)
    assert "50% less state for +0.020 nats" in chosen.reason
    assert "--method grad --key-dim 64" in chosen.command
    none = recommend(record, 0.001, Path("out"), "MODEL")
    assert (none.row, none.within) == (3, False)
    assert none.reason.startswith("no cut stays within 0.001 nats")


def rows_of(table):
    """The cells of a Markdown or LaTeX table, marks taken off."""
    lines = [line for line in table.splitlines() if "|" in line or "&" in line]
    return [[re.sub(r"\*\*|</?u>|\\\w+\{|[{}\\]", "", cell).strip() for cell in re.split(r"[|&]", line) if cell.strip()] for line in lines]  # noqa: E501  # fmt: skip


def test_tables_say_what_the_rows_say(measured_sweeps):
    _, out, record = measured_sweeps[tiny.PLAIN[0]]
    parsed = list(csv.DictReader((out / "sweep.csv").open()))
    assert [float(row["perplexity"]) for row in parsed] == [row.perplexity for row in record.rows]
    assert [(row["method"], row["score"], int(row["key_dim"]), row["state_dtype"]) for row in parsed] == [
        row.key for row in record.rows
    ]
    for name in ("word_perplexity", "bits_per_byte"):
        assert [float(row[name]) for row in parsed] == [getattr(row, name) for row in record.rows]
    assert {(row["tokens"], row["words"], row["bytes"]) for row in parsed} == {
        (str(record.uncut.tokens), str(record.uncut.words), str(record.uncut.bytes))
    }
    joint = {row.method: row for row in record.rows if row.score == "kq"}
    best = min(joint.values(), key=lambda row: row.word_perplexity)
    for name, mark in (("sweep.md", "**"), ("sweep.tex", r"\textbf{")):
        text = (out / name).read_text()
        assert f"{mark}{PER_WORD.format(best.word_perplexity)}" in text
        assert "Perplexity is per word, as in the paper's WikiText columns: 384 tokens" in text
        cells = {line[0]: line[1:] for line in rows_of(text)}
        assert cells["DRRQR"][0] == PER_WORD.format(joint["drrqr"].word_perplexity)
        assert cells["Baseline"][0] == PER_WORD.format(record.uncut.word_perplexity)
    assert (out / "sweep.tex").read_text().count(r"\multicolumn") == 1
    ablation = {line[0]: line[1:] for line in rows_of((out / "ablation.md").read_text())}
    by_keys = next(row for row in record.rows if (row.method, row.score) == ("grad", "k"))
    assert ablation["Grad"] == [PER_WORD.format(row.word_perplexity) for row in (joint["grad"], by_keys)]
    assert "Rand" not in (out / "ablation.tex").read_text()
    assert (out / "pareto.png").stat().st_size > 10_000


def test_a_sweep_with_reconstruction_judges_what_the_recommended_command_makes(
    folders, text_file, tmp_path, capsys, monkeypatch
):
    """Stopped after a row it goes on; the row is the perplexity of the model that `prune --reconstruct` writes."""
    model = folders["delta_net-plain"]
    rebuilt = ReconstructOptions(steps=3, batch=2, samples=6, length=32, learning_rate=3e-3)
    options = replace(SHORT, reconstruct=rebuilt)
    grid = SweepGrid(methods=("drrqr",), key_dims=(8,))
    given = {"text": text_file, "calibration": calibration(text_file), "grid": grid}
    record = verb(model, tmp_path / "sweep", **given, options=options)
    plain = verb(model, tmp_path / "plain", **given, options=SHORT)
    assert record.rows[0].nats_per_token != plain.rows[0].nats_per_token
    assert "--reconstruct" in record.recommended.command
    assert "--reconstruct-steps 3" in record.recommended.command
    assert not (tmp_path / "sweep" / "candidates").exists()
    _, *words = shlex.split(record.recommended.command.replace("SLIM", str(tmp_path / "cut")))
    assert run(capsys, monkeypatch, *words)[0] == 0
    measured = slimstate.evaluate(tmp_path / "cut", text_file, options=EvalOptions(length=96, max_tokens=192))
    assert measured.nats_per_token == pytest.approx(record.rows[0].nats_per_token, abs=1e-6)
    with pytest.raises(DataError, match="another reconstruct"):
        verb(model, tmp_path / "sweep", **given, options=SHORT)


def test_types_of_the_state_are_swept_alone_and_with_every_cut(folders, text_file, tmp_path, monkeypatch):
    """Rows in bytes, each what `evaluate` gives for the cut; a sweep of cuts alone goes on with another type."""
    model, asked = folders["gated_deltanet-plain"], {"text": text_file, "options": SHORT}
    grid = {"methods": ("l1",), "key_dims": (8,)}
    alone = verb(model, tmp_path / "out", grid=SweepGrid(**grid), **asked)
    counted = []
    monkeypatch.setattr(sweeps, "mean_nats", lambda *args: counted.append(1) or NATS(*args))
    both = verb(model, tmp_path / "out", grid=SweepGrid(**grid, state_dtypes=("float32", "bfloat16")), **asked)
    assert len(counted) == 2
    width = both.width
    assert [row.key for row in both.rows] == [
        ("uncut", "kq", width, "bfloat16"), ("l1", "kq", 8, "float32"), ("l1", "kq", 8, "bfloat16"),
    ]  # fmt: skip
    assert both.rows[1] == alone.rows[0]
    assert [both.uncut.state_bytes // row.state_bytes for row in both.rows] == [2, width // 8, 2 * width // 8]
    assert "--state-dtypes float32,bfloat16" in both.command
    whole = EvalOptions(length=96, max_tokens=192, state_dtype="bfloat16")
    measured = slimstate.evaluate(model, text_file, options=whole)
    assert measured.nats_per_token == pytest.approx(both.rows[0].nats_per_token, abs=1e-7)
    assert (measured.state_dtype, measured.state_bytes) == ("bfloat16", both.rows[0].state_bytes)
    cut = tmp_path / "cut"
    slimstate.prune(model, cut, method="l1", key_dim=8)
    measured = slimstate.evaluate(cut, text_file, options=whole)
    assert measured.nats_per_token == pytest.approx(both.rows[2].nats_per_token, rel=2e-3)
    assert measured.state_bytes == both.rows[2].state_bytes
    assert SweepRecord.read(tmp_path / "out" / "sweep.json") == both


def test_the_recommended_point_is_the_best_of_cuts_and_types_that_engines_have():
    def row(method, key_dim, state_dtype, size, loss):
        return Row(
            method=method, score="kq", compression=1 - key_dim / 128, key_dim=key_dim, state_dtype=state_dtype,
            state_bytes=size, nats_over_uncut=loss, nats_per_token=3 + loss,
        )  # fmt: skip

    rows = (
        row("uncut", 128, "bfloat16", 640, 0.001), row("l1", 64, "float32", 640, 0.09),
        row("l1", 64, "bfloat16", 320, 0.2), row("uncut", 128, "float8_e4m3", 322, 0.02),
    )  # fmt: skip
    record = SweepRecord(
        model="MODEL",
        width=128,
        rows=rows,
        uncut=Uncut(key_dim=128, state_bytes=1280, perplexity=20.0, rank_utilisation=0.5, nats_per_token=3.0),
    )
    chosen = recommend(record, 0.1, Path("out"), "MODEL")
    assert (chosen.row, chosen.within) == (0, True)
    assert chosen.reason.startswith("no cut, its state kept in bfloat16: 50% less state for +0.001 nats")
    assert chosen.command == "vllm serve MODEL --mamba-ssm-cache-dtype bfloat16"
    assert record.front == (0, 2, 3)
    further = recommend(record, 0.3, Path("out"), "MODEL")
    assert further.row == 2
    assert "--key-dim 64" in further.command
    assert recommend(record, 0.0001, Path("out"), "MODEL").reason.startswith("nothing stays within 0.0001 nats")
