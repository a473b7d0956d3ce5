"""Benchmarks time what they say, at the sizes they say, and every record can be run again. No timing is judged here."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import tiny
from places import ROOT
from slimstate import cli
from slimstate.benchmark import BenchOptions, MixerShape, bench_calibrate, bench_decode, bench_mixer, bench_model
from slimstate.benchmark.bench import Bench, with_ratios
from slimstate.benchmark.compilation import compile_ahead
from slimstate.benchmark.compiling_process import run_once
from slimstate.benchmark.random_models import config_of, mixer_config, mixer_of, random_model, resized, width_of
from slimstate.benchmark.tables import as_latex, as_markdown
from slimstate.benchmark.timing import copy_bandwidth, timed
from slimstate.checkpoints.reader import Checkpoint
from slimstate.families import family_of
from slimstate.models.options import RunOptions
from slimstate.models.stock import stock_model
from slimstate.pruning.calibration import calibrate
from slimstate.pruning.inspect import parameters_after, state_bytes
from slimstate.pruning.options import Calibration
from slimstate.records.benchmark import (
    CalibrationRecord,
    DecodeRecord,
    DecodeRow,
    MixerRecord,
    MixerRow,
    MixerSettings,
    ModelRecord,
    ModelRow,
)
from slimstate.records.schema import read
from slimstate.records.schema import written as as_json
from slimstate.system.errors import SlimstateError
from slimstate.system.progress import Reporter
from slimstate.training.initial_model import shipped_configs

CPU = torch.device("cpu")
SMALL = MixerShape(batch=2, length=16, hidden=32, heads=2, value_dim=8)
ONCE, TWICE = BenchOptions(rounds=1), BenchOptions(rounds=2)
SHORT = Calibration(samples=1, length=16)
FILES = [f"bench-{{}}.{suffix}" for suffix in ("json", "md", "pdf", "png", "tex")]


def written(folder, verb):
    return sorted(path.name for path in folder.iterdir()) == [name.format(verb) for name in FILES]


def test_the_clock_runs_for_the_rounds_asked_for_and_not_for_the_warm_up():
    calls = []
    found = timed(lambda: calls.append(0), CPU, rounds=5, warm_up=3)
    assert (len(calls), len(found.seconds)) == (8, 5)
    row = found.fill(MixerRow(model="delta_net", mode="forward", key_dim=8))
    low, high = row.quartiles
    assert min(found.seconds) <= low <= row.time <= high <= max(found.seconds)
    assert (row.rounds, row.peak_bytes, row.key_dim) == (5, None, 8)


def test_one_round_has_no_spread():
    found = timed(lambda: None, CPU, rounds=1)
    assert found.quartiles == (found.median, found.median)


def test_ratios_are_to_the_widest_key_dim_that_could_be_measured():
    def row(key_dim, seconds, peak, error=None, mode="forward"):
        return MixerRow(model="m", key_dim=key_dim, mode=mode, seconds=seconds, peak_bytes=peak, error=error)

    rows = [
        row(128, None, None, "out of memory"),
        row(64, 4.0, 100),
        row(32, 2.0, 50),
        row(32, 9.0, None, mode="train"),
    ]
    found = with_ratios(rows)
    assert [entry.speedup for entry in found] == [None, 1.0, 2.0, 1.0]
    assert [entry.memory_ratio for entry in found] == [None, 1.0, 0.5, None]


def test_a_graph_is_compared_with_a_graph():
    """Where the widest had no room for one, both are compared as they run without."""

    def row(key_dim, seconds, eager, graph):
        return DecodeRow(model="m", key_dim=key_dim, batch=4, seconds=seconds, eager_seconds=eager, graph=graph)

    found = with_ratios([row(64, 6.0, 6.0, False), row(32, 1.0, 3.0, True), row(16, 2.0, 2.0, False)])
    assert [entry.speedup for entry in found] == [1.0, 2.0, 3.0]


def test_copying_has_a_bandwidth():
    assert copy_bandwidth(CPU) > 1e6


@pytest.mark.parametrize("model_type", ["delta_net", "gated_deltanet", "kda", "gla", "rwkv6", "gated_deltaproduct"])
@pytest.mark.parametrize("key_dim", [3, 8, 24])
def test_a_mixer_has_the_sizes_it_is_timed_at(model_type, key_dim):
    config = mixer_config(model_type, key_dim, MixerShape(hidden=48, heads=3, value_dim=10))
    described = family_of(config).mixers(config)[0]
    assert (described.axis.heads, described.axis.width, described.value_dim) == (3, key_dim, 10)
    mixer = mixer_of(config, CPU, torch.float32)
    assert mixer.get_parameter(described.query.parameter).shape == (3 * key_dim, 48)
    if model_type in ("delta_net", "gated_deltanet"):
        assert mixer.q_proj.weight.shape == mixer.k_proj.weight.shape == (3 * key_dim, 48)
        assert mixer.v_proj.weight.shape == (30, 48)


@pytest.mark.parametrize("model_type", ["delta_net", "gated_deltanet", "kda"])
def test_a_mixer_can_be_timed_without_its_output_gate(model_type):
    """Only the gate goes, and only where the type has one by default."""
    with_gate, without = (
        mixer_of(mixer_config(model_type, 8, replace(SMALL, no_gate=no_gate)), CPU, torch.float32)
        for no_gate in (False, True)
    )
    left_out = with_gate.state_dict().keys() - without.state_dict().keys()
    assert left_out == ({"g_proj.weight"} if model_type == "gated_deltanet" else set())


@pytest.mark.slow
def test_mixers_are_timed_at_every_width_and_mode(tmp_path):
    record = bench_mixer(key_dims=(16, 8), shape=SMALL, options=TWICE, out=tmp_path)
    keys = {(row.model, row.key_dim, row.mode) for row in record.rows}
    assert len(keys) == len(record.rows) == 2 * 2 * 2
    for row in record.rows:
        assert row.tokens_per_second == pytest.approx(32 / row.time)
        assert (row.speedup == 1) == (row.key_dim == 16) or row.speedup > 0
    assert written(tmp_path, "mixer")
    assert MixerRecord.read(tmp_path / "bench-mixer.json") == record


@pytest.mark.parametrize(
    ("name", "millions", "sizes"),
    [  # layers, heads, key dim, value dim
        ("delta_net-370m", 374, (24, 8, 128, 128)), ("delta_net-1.3b", 1366, (24, 16, 128, 128)),
        ("delta_net-2.7b", 2704, (32, 20, 128, 128)),
        ("gated_deltanet-370m", 386, (23, 4, 256, 256)),  # as released
        ("gated_deltanet-1.3b", 1466, (24, 8, 256, 256)),  # m-a-p/1.3B-100B-GatedDeltaNet-pure
        ("gated_deltanet-370m-wide", 380, (21, 3, 256, 512)), ("gated_deltanet-1.3b-wide", 1387, (21, 6, 256, 512)),
    ],
)  # fmt: skip
def test_shipped_configs_have_the_sizes_of_the_models_they_are_named_after(name, millions, sizes):
    config = config_of(name)
    count = sum(weight.numel() for weight in stock_model(config).parameters())
    assert round(count / 1e6) == millions
    mixers = family_of(config).mixers(config)
    assert (len(mixers), mixers[0].axis.heads, mixers[0].axis.width, mixers[0].value_dim) == sizes
    assert width_of(config) == (128 if name.startswith("delta_net") else 256)
    assert name in shipped_configs()


@pytest.mark.slow
def test_models_are_timed_at_the_size_a_cut_would_have(folders, tmp_path):
    name = tiny.PLAIN[0]
    record = bench_model([str(folders[name])], [24, 8], batch=1, length=16, options=ONCE, out=tmp_path)
    checkpoint = Checkpoint.open(folders[name])
    for row in record.rows:
        assert row.parameters == parameters_after(checkpoint, row.key_dim)
    assert {(row.key_dim, row.mode) for row in record.rows} == {
        (key_dim, mode) for key_dim in (24, 8) for mode in ("prefill", "train")
    }
    assert written(tmp_path, "model")
    assert ModelRecord.read(tmp_path / "bench-model.json") == record


def test_a_model_is_timed_forward_with_the_logits_of_every_token(folders):
    record = bench_model([str(folders[tiny.PLAIN[0]])], [8], batch=2, length=16, modes=["forward"], options=ONCE)
    assert [(row.mode, row.graph) for row in record.rows] == [("forward", None)]
    assert record.rows[0].tokens_per_second == pytest.approx(32 / record.rows[0].time)


def test_by_default_a_model_is_timed_at_its_width_a_half_and_a_quarter(folders):
    record = bench_model([str(folders[tiny.PLAIN[1]])], batch=1, length=8, modes=["prefill"], options=ONCE)
    assert [row.key_dim for row in record.rows] == [24, 12, 6]


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.PLAIN)
def test_decoding_moves_the_state_that_inspect_counts(name, folders, tmp_path):
    record = bench_decode([str(folders[name])], [24, 8], batches=[3, 1], options=TWICE, out=tmp_path)
    mixers = Checkpoint.open(folders[name]).mixers
    assert [(row.key_dim, row.batch) for row in record.rows] == [(24, 1), (24, 3), (8, 1), (8, 3)]
    for row in record.rows:
        assert row.state_bytes == state_bytes(mixers, row.key_dim)["fp32"]
        moved = 2 * row.batch * row.state_bytes / row.time
        assert row.state_bandwidth == pytest.approx(moved)
        assert row.share_of_copy_bandwidth == pytest.approx(moved / record.copy_bandwidth)
        assert row.graph is False
    assert [entry.batch for entry in record.largest_batch] == [None, None]  # only a GPU can be full
    assert written(tmp_path, "decode")
    assert DecodeRecord.read(tmp_path / "bench-decode.json") == record


def test_calibration_is_compared_with_the_forward_pass(folders, text_file, tmp_path):
    about = Calibration(samples=2, length=16, data=str(text_file), documents="lines")
    record = bench_calibrate(str(folders[tiny.PLAIN[0]]), calibration=about, options=ONCE, out=tmp_path)
    assert "--documents lines" in record.command
    plain, *rest = record.rows
    assert [row.method for row in rest] == ["drrqr", "s-wanda", "grad"]
    assert plain.times_forward == 1
    for row in rest:
        assert row.times_forward == pytest.approx(row.time / plain.time)
        assert row.selection_seconds > 0
    assert written(tmp_path, "calibrate")
    assert CalibrationRecord.read(tmp_path / "bench-calibrate.json") == record


def test_a_config_needs_no_weights_and_no_text_to_be_calibrated(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(mixer_config("gated_deltanet", 8, SMALL)))
    record = bench_calibrate(str(config), methods=["drrqr"], calibration=SHORT, options=ONCE)
    assert [row.key_dim for row in record.rows] == [4, 4]
    with pytest.raises(SlimstateError, match=r"`data` text\.txt needs a tokenizer"):
        bench_calibrate(str(config), methods=["drrqr"], calibration="text.txt", options=ONCE)
    with pytest.raises(SlimstateError, match="key dim 500 of a model of width 8: it must lie between 1 and 8"):
        bench_calibrate(str(config), methods=["drrqr"], key_dim=500, calibration=SHORT, options=ONCE)


def test_random_weights_are_the_same_every_time():
    config = mixer_config("delta_net", 8, SMALL)
    first, second = (random_model(config, CPU, torch.bfloat16).state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}


OLD = sorted((ROOT / "docs" / "records").glob("bench-*.json"))
KINDS = {"mixer": MixerRecord, "model": ModelRecord, "decode": DecodeRecord, "calibrate": CalibrationRecord}


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_records_of_0_1_are_read_whole(path):
    """Every number that was written is there again, under its name; rows that failed are rows."""
    found = json.loads(path.read_text())
    record = KINDS[found["bench"]].read(path)
    again = record.to_json()
    parts = ("rows", "largest_batch", "settings")
    assert {key: again[key] for key in found if key not in parts} == {
        key: value for key, value in found.items() if key not in parts
    }
    assert {key: again["settings"][key] for key in found["settings"]} == found["settings"]
    for name in ("rows", "largest_batch"):
        for old, new in zip(found.get(name, []), again.get(name, []), strict=True):
            assert {key: new[key] for key in old} == old
    assert type(record).from_json(again) == record
    assert as_markdown(record).count("out of memory") == sum(row["error"] is not None for row in found["rows"])


def test_there_is_a_record_of_0_1_for_every_benchmark():
    assert {json.loads(path.read_text())["bench"] for path in OLD} == KINDS.keys()


def test_a_record_of_another_benchmark_is_refused(tmp_path):
    with pytest.raises(SlimstateError, match="bench is not one of model"):
        ModelRecord.read(ROOT / "docs" / "records" / "bench-mixer.json")


def test_a_row_with_neither_a_time_nor_an_error_is_refused(tmp_path):
    found = json.loads((ROOT / "docs" / "records" / "bench-mixer.json").read_text())
    del found["rows"][1]["seconds"]
    (tmp_path / "bench.json").write_text(json.dumps(found))
    with pytest.raises(SlimstateError, match=r"rows\[1\] has neither a time"):
        MixerRecord.read(tmp_path / "bench.json")


def test_a_model_in_a_table_of_latex_is_escaped():
    row = ModelRow(model="delta_net-370m", key_dim=8, width=16, mode="train", seconds=1.0, quartiles=(1.0, 1.0))
    record = ModelRecord.read(ROOT / "docs" / "records" / "bench-model.json")
    assert r"\textbf{delta\_net-370m, train}" in as_latex(replace(record, rows=(row,)))


@pytest.fixture(scope="module")
def records(folders):
    model = str(folders[tiny.PLAIN[0]])
    return [
        bench_mixer(["delta_net"], [8, 4], shape=SMALL, options=ONCE, run=RunOptions(dtype="bfloat16")),
        bench_model([model], [24, 12], batch=1, length=8, options=ONCE),
        bench_decode([model], [24], batches=[1], options=ONCE),
        bench_calibrate(model, methods=["drrqr"], calibration=SHORT, options=ONCE),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("place", range(4))
def test_the_command_of_a_record_makes_the_same_rows(place, records, capsys, monkeypatch):
    record = records[place]
    monkeypatch.setattr(sys, "argv", [*shlex.split(record.command), "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    again = type(record).from_json(json.loads(capsys.readouterr().out))
    assert again.settings == record.settings
    assert [row.label for row in again.rows] == [row.label for row in record.rows]
    assert (again.command, again.dtype) == (record.command, record.dtype)


@pytest.mark.parametrize("place", range(3))
def test_the_process_that_compiles_runs_what_the_settings_say(place, records):
    record = records[place]
    again = run_once(record.bench, json.dumps(as_json(record.settings)), RunOptions(device="cpu", dtype=record.dtype))
    assert again.settings == record.settings
    assert [row.label for row in again.rows] == [row.label for row in record.rows]


def test_a_width_is_compiled_by_a_process_that_is_told_its_settings(monkeypatch):
    """On a GPU, which is only spoken of here; a process that fails is a line and not the end."""
    told, lines = [], []

    def process(words, **_):
        told.append(words[-4:])
        return subprocess.CompletedProcess(words, 1, "", "first\nno room")

    monkeypatch.setattr(subprocess, "run", process)
    bench = Bench.begin("mixer", BenchOptions(jobs=2), RunOptions(dtype="bfloat16"))
    reporter = Reporter()
    reporter.say = lines.append
    cases = [MixerSettings(models=("delta_net",), key_dims=(key_dim,), batch=2) for key_dim in (64, 32)]
    compile_ahead(bench, cases)
    assert told == []
    compile_ahead(replace(bench, device=torch.device("cuda"), reporter=reporter), cases)
    words = [(module, verb, dtype, read(MixerSettings, json.loads(text))) for module, verb, dtype, text in told]
    wanted = [("slimstate.benchmark.compiling_process", "mixer", "bfloat16", case) for case in cases]
    assert sorted(words, key=str) == sorted(wanted, key=str)
    assert lines[0] == "compiling 2 widths in 2 processes"
    assert lines[1:] == [f"key dim {width} is compiled later, when it is timed: no room" for width in (64, 32)]


@pytest.mark.parametrize("place", range(4))
def test_tables_have_a_cell_for_every_column(place, records):
    record = records[place]
    lines = as_markdown(record).splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    latex = as_latex(record)
    body = [line for line in latex.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert len({len(re.findall(r"(?<!\\)&", line)) for line in body}) == 1
    assert latex.count(r"\begin") == latex.count(r"\end") == 1


def test_a_full_gpu_is_a_row_and_not_the_end(monkeypatch):
    def full(*args):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("slimstate.benchmark.mixers._measure", full)
    record = bench_mixer(["delta_net"], [8], shape=SMALL, options=TWICE)
    assert [(row.error, row.speedup) for row in record.rows] == [("out of memory", None)] * 2
    assert "out of memory" in as_markdown(record)
    as_latex(record)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("mixer", "--models", "mamba9"), "no mixer benchmark for 'mamba9'"),
        (("mixer", "--key-dims", "0"), "--key-dims 0: it must be at least 1"),
        (("mixer", "--key-dims", "a"), "--key-dims a"),
        (("mixer", "--modes", "backward"), "unknown mode 'backward'; there are forward, train"),
        (("mixer", "--rounds", "0"), "--rounds 0: at least one"),
        (("model", "--models", "nowhere"), "or one of delta_net-1.3b"),
        (("model", "--models", "delta_net-370m", "--key-dims", "256"), "between 1 and 128"),
        (("decode", "--batches", "0"), "--batches 0"),
        (("calibrate", "--methods", "l1"), "l1 looks at no activations"),
        (("calibrate", "--methods", "best"), "unknown method 'best'"),
        (("mixer", "--out", __file__), "is a file; --out is a folder"),
        (("mixer", "--device", "cuda"), "no CUDA device"),
    ],
)
def test_what_cannot_be_timed_is_one_line(arguments, complaint, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["slimstate", "bench", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2
    assert last.startswith("slimstate: ")
    assert complaint in last


def test_a_wider_model_than_the_config_is_refused():
    with pytest.raises(SlimstateError, match="between 1 and 8"):
        resized(mixer_config("delta_net", 8, SMALL), 9)


def test_calibrating_a_benchmark_leaves_the_model_as_it_was(folders):
    """The forward pass that is timed first is that of the model itself, before and after a calibration."""
    from slimstate.models.load import load

    runtime = load(folders[tiny.PLAIN[0]])
    ids = torch.arange(32).view(2, 16)
    with torch.inference_mode():
        before = runtime.model(input_ids=ids).logits
        calibrate(runtime, Checkpoint.open(folders[tiny.PLAIN[0]]).mixers, ids, frozenset({"gram"}))
        assert torch.equal(runtime.model(input_ids=ids).logits, before)
