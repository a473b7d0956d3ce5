"""Benchmarks time what they say, at the sizes they say, and every record can be run again. No timing is judged here."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
import torch

import tiny
from slimstate import cli
from slimstate.benchmark import bench_calibrate, bench_decode, bench_mixer, bench_model
from slimstate.benchmark.recording import with_ratios
from slimstate.benchmark.subjects import config_of, mixer_config, mixer_of, random_model, resized, width_of
from slimstate.benchmark.tables import as_latex, as_markdown
from slimstate.benchmark.timing import copy_bandwidth, timed
from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.stock import stock_model
from slimstate.pruning.calibration import calibrate
from slimstate.pruning.inspect import parameters_after, state_bytes
from slimstate.system.errors import SlimstateError
from slimstate.training.initial_model import shipped_configs

CPU = torch.device("cpu")
SMALL = {"batch": 2, "length": 16, "hidden": 32, "heads": 2, "value_dim": 8, "rounds": 2}
FILES = [f"bench-{{}}.{suffix}" for suffix in ("json", "md", "pdf", "png", "tex")]


def written(folder, verb):
    return sorted(path.name for path in folder.iterdir()) == [name.format(verb) for name in FILES]


def test_the_clock_runs_for_the_rounds_asked_for_and_not_for_the_warm_up():
    calls = []
    found = timed(lambda: calls.append(0), CPU, rounds=5, warm_up=3)
    assert (len(calls), len(found.seconds)) == (8, 5)
    described = found.describe()
    low, high = described["quartiles"]
    assert min(found.seconds) <= low <= described["seconds"] <= high <= max(found.seconds)
    assert (described["rounds"], described["peak_bytes"]) == (5, None)


def test_one_round_has_no_spread():
    found = timed(lambda: None, CPU, rounds=1).describe()
    assert found["quartiles"] == [found["seconds"]] * 2


def test_ratios_are_to_the_widest_key_dim_that_could_be_measured():
    def row(key_dim, seconds, peak, error=None, mode="forward"):
        return {"key_dim": key_dim, "mode": mode, "seconds": seconds, "peak_bytes": peak, "error": error}

    rows = [
        row(128, None, None, "out of memory"),
        row(64, 4.0, 100),
        row(32, 2.0, 50),
        row(32, 9.0, None, mode="train"),
    ]
    found = with_ratios(rows, ("mode",))
    assert [entry["speedup"] for entry in found] == [None, 1.0, 2.0, 1.0]
    assert [entry["memory_ratio"] for entry in found] == [None, 1.0, 0.5, None]


def test_copying_has_a_bandwidth():
    assert copy_bandwidth(CPU) > 1e6


@pytest.mark.parametrize("model_type", ["delta_net", "gated_deltanet"])
@pytest.mark.parametrize("key_dim", [3, 8, 24])
def test_a_mixer_has_the_sizes_it_is_timed_at(model_type, key_dim):
    config = mixer_config(model_type, hidden=48, heads=3, key_dim=key_dim, value_dim=10)
    mixer = mixer_of(config, CPU, torch.float32)
    assert mixer.q_proj.weight.shape == mixer.k_proj.weight.shape == (3 * key_dim, 48)
    assert mixer.v_proj.weight.shape == (30, 48)


def test_mixers_are_timed_at_every_width_and_mode(tmp_path):
    record = bench_mixer(key_dims=(16, 8), **SMALL, out=tmp_path)
    keys = {(row["model"], row["key_dim"], row["mode"]) for row in record["rows"]}
    assert len(keys) == len(record["rows"]) == 2 * 2 * 2
    for row in record["rows"]:
        assert row["tokens_per_second"] == pytest.approx(32 / row["seconds"])
        assert (row["speedup"] == 1) == (row["key_dim"] == 16) or row["speedup"] > 0
    assert written(tmp_path, "mixer")
    assert json.loads((tmp_path / "bench-mixer.json").read_text())["rows"] == record["rows"]


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("delta_net-370m", 0.36, 0.38), ("delta_net-1.3b", 1.3, 1.4), ("delta_net-2.7b", 2.65, 2.75),
        ("gated_deltanet-370m", 0.36, 0.385), ("gated_deltanet-1.3b", 1.3, 1.4),
    ],
)  # fmt: skip
def test_shipped_configs_have_the_size_in_their_name_and_the_papers_key_dim(name, least, most):
    config = config_of(name)
    count = sum(weight.numel() for weight in stock_model(config).parameters())
    assert least * 1e9 < count < most * 1e9
    assert width_of(config) == (128 if name.startswith("delta_net") else 256)
    assert name in shipped_configs()


def test_models_are_timed_at_the_size_a_cut_would_have(folders, tmp_path):
    name = tiny.PLAIN[0]
    record = bench_model([str(folders[name])], [24, 8], batch=1, length=16, rounds=1, out=tmp_path)
    checkpoint = Checkpoint.open(folders[name])
    for row in record["rows"]:
        assert row["parameters"] == parameters_after(checkpoint, row["key_dim"])
    assert {(row["key_dim"], row["mode"]) for row in record["rows"]} == {
        (key_dim, mode) for key_dim in (24, 8) for mode in ("prefill", "train")
    }
    assert written(tmp_path, "model")


def test_by_default_a_model_is_timed_at_its_width_a_half_and_a_quarter(folders):
    record = bench_model([str(folders[tiny.PLAIN[1]])], batch=1, length=8, modes=["prefill"], rounds=1)
    assert [row["key_dim"] for row in record["rows"]] == [24, 12, 6]


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_decoding_moves_the_state_that_inspect_counts(name, folders, tmp_path):
    record = bench_decode([str(folders[name])], [24, 8], batches=[3, 1], rounds=2, out=tmp_path)
    mixers = Checkpoint.open(folders[name]).mixers
    assert [(row["key_dim"], row["batch"]) for row in record["rows"]] == [(24, 1), (24, 3), (8, 1), (8, 3)]
    for row in record["rows"]:
        assert row["state_bytes"] == state_bytes(mixers, row["key_dim"])["fp32"]
        moved = 2 * row["batch"] * row["state_bytes"] / row["seconds"]
        assert row["state_bandwidth"] == pytest.approx(moved)
        assert row["share_of_copy_bandwidth"] == pytest.approx(moved / record["copy_bandwidth"])
        assert row["graph"] is False
    assert [entry["batch"] for entry in record["largest_batch"]] == [None, None]  # only a GPU can be full
    assert written(tmp_path, "decode")


def test_calibration_is_compared_with_the_forward_pass(folders, text_file, tmp_path):
    settings = {"samples": 2, "length": 16, "data": str(text_file), "rounds": 1, "out": tmp_path}
    record = bench_calibrate(str(folders[tiny.PLAIN[0]]), **settings)
    plain, *rest = record["rows"]
    assert [row["method"] for row in rest] == ["drrqr", "s-wanda", "grad"]
    assert plain["times_forward"] == 1
    for row in rest:
        assert row["times_forward"] == pytest.approx(row["seconds"] / plain["seconds"])
        assert row["selection_seconds"] > 0
    assert written(tmp_path, "calibrate")


def test_a_config_needs_no_weights_and_no_text_to_be_calibrated(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(mixer_config("gated_deltanet", hidden=32, heads=2, key_dim=8, value_dim=8)))
    record = bench_calibrate(str(config), methods=["drrqr"], samples=1, length=16, rounds=1)
    assert [row["key_dim"] for row in record["rows"]] == [4, 4]


def test_random_weights_are_the_same_every_time():
    config = mixer_config("delta_net", hidden=32, heads=2, key_dim=8, value_dim=8)
    first, second = (random_model(config, CPU, torch.bfloat16).state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}


@pytest.fixture(scope="module")
def records(folders):
    model = str(folders[tiny.PLAIN[0]])
    return [
        bench_mixer(["delta_net"], [8, 4], **{**SMALL, "rounds": 1}),
        bench_model([model], [24, 12], batch=1, length=8, rounds=1),
        bench_decode([model], [24], batches=[1], rounds=1),
        bench_calibrate(model, methods=["drrqr"], samples=1, length=16, rounds=1),
    ]


@pytest.mark.parametrize("place", range(4))
def test_the_command_of_a_record_makes_the_same_rows(place, records, capsys, monkeypatch):
    record = records[place]
    monkeypatch.setattr(sys, "argv", [*shlex.split(record["command"]), "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    again = json.loads(capsys.readouterr().out)
    assert again["settings"] == record["settings"]
    assert [list(row) for row in again["rows"]] == [list(row) for row in record["rows"]]
    assert again["command"] == record["command"]


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

    monkeypatch.setattr("slimstate.benchmark.mixing._measure", full)
    record = bench_mixer(["delta_net"], [8], **SMALL)
    assert [(row["error"], row["speedup"]) for row in record["rows"]] == [("out of memory", None)] * 2
    assert "out of memory" in as_markdown(record)
    as_latex(record)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("mixer", "--models", "mamba9"), "no mixer benchmark for 'mamba9'"),
        (("mixer", "--key-dims", "0"), "key dim 0"),
        (("mixer", "--key-dims", "a"), "--key-dims a"),
        (("mixer", "--modes", "backward"), "unknown mode 'backward'; there are forward, train"),
        (("mixer", "--rounds", "0"), "0 rounds"),
        (("model", "--models", "nowhere"), "or one of delta_net-1.3b"),
        (("model", "--models", "delta_net-370m", "--key-dims", "256"), "between 1 and 128"),
        (("decode", "--batches", "0"), "batch 0"),
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
        resized(mixer_config("delta_net", hidden=32, heads=2, key_dim=8, value_dim=8), 9)


def test_calibrating_a_benchmark_leaves_the_model_as_it_was(folders):
    """The forward pass that is timed first is that of the model itself, before and after a calibration."""
    from slimstate.models.load import load

    runtime = load(folders[tiny.PLAIN[0]])
    ids = torch.arange(32).view(2, 16)
    with torch.inference_mode():
        before = runtime.model(input_ids=ids).logits
        calibrate(runtime, Checkpoint.open(folders[tiny.PLAIN[0]]).mixers, ids, frozenset({"gram"}))
        assert torch.equal(runtime.model(input_ids=ids).logits, before)
