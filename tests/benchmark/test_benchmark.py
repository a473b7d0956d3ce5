"""Benchmarks time what they say, at the sizes they say, and every record can be repeated. No timing is judged here."""

import json
import re
import shlex
import subprocess
from dataclasses import replace

import pytest
import torch

import tiny
from places import ROOT
from recoveries import Listener
from slimstate import bench_calibrate, bench_decode, bench_mixer, bench_model
from slimstate.benchmark.bench import Bench, compile_ahead, with_ratios
from slimstate.benchmark.options import MixerBenchConfig
from slimstate.benchmark.random_models import config_of, mixer_config, mixer_of, random_model, width_of
from slimstate.benchmark.tables import as_latex, as_markdown
from slimstate.benchmark.timing import time_rounds
from slimstate.checkpoints.reader import Checkpoint
from slimstate.families import family_of
from slimstate.models.load import load
from slimstate.models.options import RunOptions
from slimstate.models.shapes import shipped_shapes
from slimstate.models.stock import stock_model
from slimstate.pruning.calibration import calibrate
from slimstate.pruning.sizes import parameters_after, state_bytes
from slimstate.records.benchmark import DecodeRow, MixerRecord, MixerRow, ModelRecord, ModelRow
from slimstate.system.errors import SlimstateError

CPU = torch.device("cpu")
RECORDS = ROOT / "docs" / "records"
KINDS = ("mixer", "model", "decode", "calibrate")
SIZES = {"batch": 2, "length": 16, "hidden": 32, "heads": 2, "value_dim": 8}
SMALL = MixerBenchConfig(models=("delta_net",), **SIZES)
ONCE = {"rounds": 1, "progress": False}
TWICE = {"rounds": 2, "progress": False}
SHORT = {"samples": 1, "length": 16, **ONCE}


def check_files(record, folder):
    """The record is there with its tables and its figure, and reads back as it was."""
    names = [f"bench-{record.bench}.{suffix}" for suffix in ("json", "md", "pdf", "png", "tex")]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert type(record).read(folder / names[0]) == record


def test_only_the_rounds_after_the_warm_up_are_timed():
    calls = []
    seconds, peak = time_rounds(lambda: calls.append(0), CPU, rounds=5, warm_up=3)
    assert (len(calls), len(seconds), peak) == (8, 5, None)


def test_a_row_gets_the_median_and_the_quartiles(monkeypatch):
    row = MixerRow(model="delta_net", mode="forward", key_dim=8)
    bench = Bench.prepare("mixer", SMALL)
    monkeypatch.setattr("slimstate.benchmark.timing.time_rounds", lambda *_, **__: ([4.0, 1.0, 2.0, 3.0, 9.0], 7))
    timed = bench.time(row, lambda: None)
    assert (timed.time, timed.quartiles, timed.rounds, timed.peak_bytes) == (3.0, (1.5, 6.5), 5, 7)
    monkeypatch.setattr("slimstate.benchmark.timing.time_rounds", lambda *_, **__: ([4.0], None))
    assert bench.time(row, lambda: None).quartiles == (4.0, 4.0)


def test_ratios_are_to_the_widest_key_dim_that_was_measured():
    def row(key_dim, seconds, peak, error=None, mode="forward"):
        return MixerRow(model="m", key_dim=key_dim, mode=mode, seconds=seconds, peak_bytes=peak, error=error)

    failed, train = row(128, None, None, "out of memory"), row(32, 9.0, None, mode="train")
    rows = with_ratios([failed, row(64, 4.0, 100), row(32, 2.0, 50), train])
    assert [row.speedup for row in rows] == [None, 1.0, 2.0, 1.0]
    assert [row.memory_ratio for row in rows] == [None, 1.0, 0.5, None]


def test_a_graph_is_compared_with_a_graph():
    """Where one of two rows has no graph, their launches are compared."""

    def row(key_dim, seconds, eager, graph):
        return DecodeRow(model="m", key_dim=key_dim, batch=4, seconds=seconds, eager_seconds=eager, graph=graph)

    rows = with_ratios([row(64, 6.0, 6.0, False), row(32, 1.0, 3.0, True), row(16, 2.0, 2.0, False)])
    assert [row.speedup for row in rows] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("model_type", ["delta_net", "gated_deltanet", "kda", "gla", "rwkv6", "gated_deltaproduct"])
@pytest.mark.parametrize("key_dim", [3, 8, 24])
def test_a_mixer_has_the_sizes_it_is_timed_at(model_type, key_dim):
    config = mixer_config(model_type, key_dim, replace(SMALL, hidden=48, heads=3, value_dim=10))
    described = family_of(config).mixers(config)[0]
    assert (described.axis.heads, described.axis.width, described.value_dim) == (3, key_dim, 10)
    mixer = mixer_of(config, CPU, torch.float32)
    assert mixer.get_parameter(described.query.parameter).shape == (3 * key_dim, 48)
    if model_type in ("delta_net", "gated_deltanet"):
        assert mixer.q_proj.weight.shape == mixer.k_proj.weight.shape == (3 * key_dim, 48)
        assert mixer.v_proj.weight.shape == (30, 48)


@pytest.mark.parametrize("model_type", ["delta_net", "gated_deltanet", "kda"])
def test_a_mixer_can_be_timed_without_its_output_gate(model_type):
    """Only the gate is removed, and only where the type has one by default."""
    configs = (mixer_config(model_type, 8, replace(SMALL, no_gate=no_gate)) for no_gate in (False, True))
    gated, plain = (mixer_of(config, CPU, torch.float32) for config in configs)
    removed = gated.state_dict().keys() - plain.state_dict().keys()
    assert removed == ({"g_proj.weight"} if model_type == "gated_deltanet" else set())


@pytest.mark.slow
def test_mixers_are_timed_at_every_width_and_mode(tmp_path):
    record = bench_mixer(key_dims=("16x4", 8, "12x8"), **SIZES, **TWICE, out=tmp_path)
    keys = {(row.model, row.key_dim, row.value_dim, row.mode) for row in record.rows}
    assert len(keys) == len(record.rows) == 2 * 3 * 2
    assert {(key_dim, value_dim) for _, key_dim, value_dim, _ in keys} == {(16, 4), (8, 8), (12, 8)}
    for row in record.rows:
        assert row.tokens_per_second == pytest.approx(32 / row.time)
        assert row.speedup == 1 or row.key_dim != 12  # the largest state
    check_files(record, tmp_path)


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
    assert width_of(config) == sizes[2]
    assert name in shipped_shapes()


@pytest.mark.slow
def test_models_are_timed_at_the_size_a_cut_would_have(folders, tmp_path):
    folder = folders[tiny.PLAIN[0]]
    record = bench_model(models=[str(folder)], key_dims=[24, 8, "8x4"], batch=1, length=16, **ONCE, out=tmp_path)
    checkpoint = Checkpoint.open(folder)
    values = checkpoint.mixers[0].value_dim
    for row in record.rows:
        assert row.parameters == parameters_after(checkpoint, row.key_dim, row.value_dim)
    assert {(row.key_dim, row.value_dim, row.mode) for row in record.rows} == {
        (*dims, mode) for dims in ((24, values), (8, values), (8, 4)) for mode in ("prefill", "train")
    }
    check_files(record, tmp_path)


def test_by_default_a_model_is_timed_at_its_width_a_half_and_a_quarter(folders):
    record = bench_model(models=[str(folders[tiny.PLAIN[1]])], batch=2, length=8, modes=["forward"], **ONCE)
    assert [(row.key_dim, row.mode, row.graph) for row in record.rows] == [(n, "forward", None) for n in (24, 12, 6)]
    for row in record.rows:
        assert row.tokens_per_second == pytest.approx(16 / row.time)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.PLAIN)
def test_decoding_moves_the_state_that_inspect_counts(name, folders, tmp_path):
    record = bench_decode(models=[str(folders[name])], key_dims=[24, "8x4"], batches=[3, 1], **TWICE, out=tmp_path)
    mixers = Checkpoint.open(folders[name]).mixers
    assert [(row.key_dim, row.batch) for row in record.rows] == [(24, 1), (24, 3), (8, 1), (8, 3)]
    assert [row.value_dim for row in record.rows] == [mixers[0].value_dim] * 2 + [4] * 2
    for row in record.rows:
        assert row.state_bytes == state_bytes(mixers, row.key_dim, row.value_dim)["fp32"]
        moved = 2 * row.batch * row.state_bytes / row.time
        assert row.state_bandwidth == pytest.approx(moved)
        assert row.share_of_copy_bandwidth == pytest.approx(moved / record.copy_bandwidth)
        assert row.graph is False
    assert [entry.batch for entry in record.largest_batch] == [None, None]  # only a GPU can be full
    check_files(record, tmp_path)


@pytest.mark.slow
def test_calibration_is_compared_with_the_forward_pass(folders, text_file, tmp_path):
    text = {"data": str(text_file), "documents": "lines", **SHORT, "samples": 2}
    record = bench_calibrate(model=str(folders[tiny.PLAIN[0]]), **text, out=tmp_path)
    assert "--documents lines" in record.command
    forward, *rest = record.rows
    assert [row.method for row in rest] == ["drrqr", "s-wanda", "grad"]
    assert forward.times_forward == 1
    for row in rest:
        assert row.times_forward == pytest.approx(row.time / forward.time)
        assert row.selection_seconds > 0
    check_files(record, tmp_path)


def test_a_config_needs_no_weights_and_no_text_to_be_calibrated(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(mixer_config("gated_deltanet", 8, SMALL)))
    options = {"model": str(config), "methods": ["drrqr"], **SHORT}
    assert [row.key_dim for row in bench_calibrate(**options).rows] == [4, 4]
    with pytest.raises(SlimstateError, match=r"`data` text\.txt needs a tokenizer"):
        bench_calibrate(**options, data="text.txt")
    with pytest.raises(SlimstateError, match="must be between 1 and 8, the width of the model, got 500"):
        bench_calibrate(**options, key_dim=500)


def test_random_weights_are_the_same_every_time():
    config = mixer_config("delta_net", 8, SMALL)
    first, second = (random_model(config, CPU, torch.bfloat16).state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}


def test_broken_records_are_refused(tmp_path):
    with pytest.raises(SlimstateError, match="bench"):
        ModelRecord.read(RECORDS / "bench-mixer.json")
    data = json.loads((RECORDS / "bench-mixer.json").read_text())
    del data["rows"][1]["seconds"]
    (tmp_path / "bench.json").write_text(json.dumps(data))
    with pytest.raises(SlimstateError, match=r"rows\[1\] must have a time"):
        MixerRecord.read(tmp_path / "bench.json")


def test_names_of_models_are_escaped_in_latex():
    row = ModelRow(model="delta_net-370m", key_dim=8, width=16, mode="train", seconds=1.0, quartiles=(1.0, 1.0))
    record = ModelRecord.read(RECORDS / "bench-model.json")
    assert r"\textbf{delta\_net-370m, train}" in as_latex(replace(record, rows=(row,)))


@pytest.fixture(scope="module")
def records(folders):
    model = str(folders[tiny.PLAIN[0]])
    return {
        "mixer": bench_mixer(models=["delta_net"], key_dims=[8, 4], dtype="bfloat16", **SIZES, **ONCE),
        "model": bench_model(models=[model], key_dims=["24x8", 12, "12x8"], batch=1, length=8, **ONCE),
        "decode": bench_decode(models=[model], key_dims=[24], batches=[1], **ONCE),
        "calibrate": bench_calibrate(model=model, methods=["drrqr"], **SHORT),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_command_of_a_record_makes_the_same_rows(name, records, succeed):
    record = records[name]
    again = type(record).from_json(json.loads(succeed(*shlex.split(record.command)[1:], "--json")))
    assert (again.config, again.dtype, again.settings) == (record.config, record.dtype, record.settings)
    assert [row.label for row in again.rows] == [row.label for row in record.rows]


def test_each_key_dim_is_compiled_by_a_process_that_runs_its_command(monkeypatch):
    """The GPU is pretended. A process that fails is reported and ends nothing."""
    calls = []

    def process(words, **_):
        calls.append(shlex.join(words[2:]))
        return subprocess.CompletedProcess(words, 1, "", "first\nno room")

    monkeypatch.setattr(subprocess, "run", process)
    listener, widths = Listener(), [("delta_net", 64), ("delta_net", 32)]
    config = replace(SMALL, jobs=2, rounds=5, run=RunOptions(dtype="bfloat16"))
    bench = Bench.prepare("mixer", config)
    compile_ahead(bench, config, widths)
    assert calls == []
    compile_ahead(replace(bench, device=torch.device("cuda"), reporter=listener), config, widths)
    start = "slimstate bench mixer --rounds 1 --dtype bfloat16 --models delta_net --key-dims"
    sizes = "--batch 2 --length 16 --hidden 32 --heads 2 --value-dim 8"
    assert {*calls} == {f"{start} {width} {sizes}" for width in (64, 32)}
    first, *rest = listener.lines
    assert first == "compiling 2 widths in 2 processes"
    assert rest == [f"key dim {width} will be compiled when it is timed: no room" for width in (64, 32)]


@pytest.mark.parametrize("name", KINDS)
def test_tables_have_a_cell_for_every_column(name, records):
    lines = as_markdown(records[name]).splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    latex = as_latex(records[name])
    body = [line for line in latex.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert len({len(re.findall(r"(?<!\\)&", line)) for line in body}) == 1
    assert latex.count(r"\begin") == latex.count(r"\end") == 1


def test_a_full_gpu_is_a_row_and_not_the_end(monkeypatch):
    def full(*args):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("slimstate.benchmark.passes._measure_mixer", full)
    record = bench_mixer(models=["delta_net"], key_dims=[8], **SIZES, **TWICE)
    assert [(row.error, row.speedup) for row in record.rows] == [("out of memory", None)] * 2
    assert "out of memory" in as_markdown(record)
    as_latex(record)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("mixer", "--models", "mamba9"), "no mixer benchmark for 'mamba9'"),
        (("mixer", "--key-dims", "0"), "--key-dims must be numbers such as 64, or pairs such as 64x128, got 0"),
        (("mixer", "--key-dims", "64xa"), "--key-dims must be numbers such as 64, or pairs such as 64x128, got 64xa"),
        (("mixer", "--modes", "backward"), "unknown --modes backward; there are forward, train"),
        (("mixer", "--rounds", "0"), "--rounds must be at least 1"),
        (("model", "--models", "nowhere"), "or one of delta_net-1.3b"),
        (("model", "--models", "delta_net-370m", "--key-dims", "256"), "between 1 and 128"),
        (("decode", "--key-dims", "64x256"), "the value dim must be between 1 and 128"),
        (("decode", "--batches", "0"), "--batches must be at least 1"),
        (("calibrate", "--methods", "l1"), "l1 needs no calibration"),
        (("calibrate", "--methods", "best"), "unknown method 'best'"),
        (("mixer", "--out", __file__), "is a file; --out must be a folder"),
        (("mixer", "--device", "cuda"), "no CUDA device"),
    ],
)
def test_bad_options_are_one_line(arguments, complaint, refusal):
    assert complaint in refusal("bench", *arguments)


def test_calibration_leaves_the_model_unchanged(folders):
    """The forward pass that is timed first computes the same before and after a calibration."""
    runtime = load(folders[tiny.PLAIN[0]])
    ids = torch.arange(32).view(2, 16)
    with torch.inference_mode():
        before = runtime.model(input_ids=ids).logits
        calibrate(runtime, Checkpoint.open(folders[tiny.PLAIN[0]]).mixers, ids, frozenset({"gram"}))
        assert torch.equal(runtime.model(input_ids=ids).logits, before)
