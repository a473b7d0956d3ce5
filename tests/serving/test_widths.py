"""Advice on key dims comes from the times of a record and names it; where no record covers a layer, there is none."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import slimstate
import tiny
from places import ROOT
from slimstate.models.shapes import read_shape
from slimstate.records.benchmark import DecodeRecord, KernelRecord, KernelRow, MixerRecord, MixerRow
from slimstate.serving import widths
from slimstate.serving.gains import Load
from slimstate.serving.widths import Curve, decoding_curve, matching_curves, mixer_curve, speed_of_cut, speeds_below

# a kernel that works on 128, 64, 32 or 16 channels, with a little noise
MILLISECONDS = {
    128: 13.0, 120: 13.1, 112: 12.8, 104: 12.6, 96: 12.9, 88: 12.7, 80: 12.6, 72: 12.7,
    64: 10.0, 56: 9.9, 48: 9.5, 40: 9.6, 32: 7.8, 24: 7.9, 16: 6.5,
}  # fmt: skip
SOURCE = (
    "NVIDIA X1: one layer by itself, forward over 4 x 512 tokens, hidden 256, 2 heads, value dim 32, bfloat16{};"
    " a whole model gains less"
)
BELOW_128 = (
    "speed against key dim 128, gains up to 4% left out: 120 to 72 no faster; 64 1.30x, 48 1.37x, 32 1.67x, 16 2.00x;"
    f" those between gain less than 4% on the next wider one named ({SOURCE.format('')})"
)
TO_77 = f"key dim 77 runs at the speed of 128; 64 is 1.30x ({SOURCE.format('; 77 taken as 80')})"
MIXER: Any = SimpleNamespace(axis=SimpleNamespace(width=128), value_heads=48, value_dim=128)
RECORDS = ROOT / "docs" / "records"


def row(key_dim: int, milliseconds: float, **changes: Any) -> MixerRow:
    time = milliseconds / 1000
    row = MixerRow(model="delta_net", mode="forward", seconds=time, quartiles=(time, time), key_dim=key_dim)
    return replace(row, **changes)


def record(rows: list[MixerRow]) -> MixerRecord:
    sizes = {"batch": 4, "length": 512, "hidden": 256, "heads": 2, "value_dim": 32}
    run = {"device": "NVIDIA X1", "kernels": "fla", "dtype": "bfloat16", "rounds": 1, "command": ""}
    return MixerRecord(**run, settings=sizes, rows=tuple(rows))


def curve(times: dict[int, float]) -> Curve:
    return mixer_curve(record([row(*pair) for pair in times.items()]), "delta_net")


@pytest.fixture
def curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "curves"
    folder.mkdir()
    monkeypatch.setattr(widths, "CURVES", folder)
    return folder


@pytest.fixture
def measured(curves: Path) -> None:
    record([row(*pair) for pair in MILLISECONDS.items()]).write(curves / "x1.json")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    variant, root = tiny.VARIANTS["delta_net-plain"], tmp_path_factory.mktemp("wide")
    return {width: tiny.save(tiny.build(variant, expand_k=width / 32), root / str(width)) for width in (128, 256)}


def test_a_width_between_two_runs_at_the_speed_of_the_wider():
    known = curve({16: 1.0, 32: 2.0, 64: 3.0})
    assert [known.speedup(64, key_dim) for key_dim in (64, 33, 32, 17, 16)] == [1.0, 1.0, 1.5, 1.5, 3.0]
    assert known.speedup(48, 32) == 1.5
    assert [known.covers(key_dim) for key_dim in (15, 16, 40, 64, 65)] == [False, True, True, True, False]


def test_faster_key_dims_are_clearly_faster_than_all_wider_ones():
    assert curve(MILLISECONDS).faster_key_dims(128) == [64, 48, 32, 16]
    assert curve(MILLISECONDS).faster_key_dims(64) == [48, 32, 16]
    gradual = curve({16: 1.0, 24: 1.03, 32: 1.06, 40: 1.09})
    assert gradual.faster_key_dims(40) == [24]  # 1.09 / 1.03 is the first above 1.04
    assert curve({16: 1.0, 32: 1.04}).faster_key_dims(32) == []
    assert curve(MILLISECONDS).summary(128) == BELOW_128


def test_advice_names_the_next_step_where_one_is_near():
    known = curve(MILLISECONDS)
    assert known.advice(128, 77) == TO_77
    assert known.advice(128, 64) == f"key dim 64 is 1.30x as fast as 128; 48 is 1.37x ({SOURCE.format('')})"
    assert known.advice(128, 32) == f"key dim 32 is 1.67x as fast as 128 ({SOURCE.format('')})"  # 16 is half of it
    assert known.advice(60, 20).startswith("key dim 20 is about 1.27x as fast as 60; 16 is 1.54x (")
    assert known.advice(60, 20).endswith("; 60 taken as 64; 20 taken as 24; a whole model gains less)")


def test_a_slope_has_no_steps_and_a_slower_width_is_called_slower():
    slope = curve({width: 100 + 0.3 * width for width in range(16, 129, 8)})  # 2 % for each 8 channels
    assert [slope.next_step(key_dim) for key_dim in range(16, 129)] == [None] * 113
    bump = curve({48: 1.0, 56: 1.25, 64: 1.0})
    assert bump.advice(64, 56).startswith("key dim 56 is 0.80x as fast as 64; 48 is 1.00x (")
    assert bump.summary(64).startswith("speed against key dim 64, gains up to 4% left out: 56 to 48 no faster (")


def test_only_forward_passes_that_ran_make_a_curve():
    rows = [row(16, 1.0), row(32, 2.0), row(32, 9.0, mode="train"), row(32, 7.0, model="gated_deltanet")]
    failed = MixerRow(model="delta_net", mode="forward", key_dim=64, error="out of memory")
    assert mixer_curve(record([*rows, failed]), "delta_net").seconds == {16: 0.001, 32: 0.002}
    assert mixer_curve(record(rows), "kda") is None
    with pytest.raises(ValueError, match="at least one time"):
        Curve(device="", kernels="", conditions="", seconds={}, heads=16, value_dim=128)


def test_pairs_of_dims_have_speeds_of_their_own(curves):
    """Their few key dims do not stand for the curve of key dims, and only pairs that were timed have a speed."""
    seconds = {(128, 32): 4.0, (64, 32): 3.0, (128, 16): 2.5, (64, 16): 2.0}
    rows = [replace(row(keys, time), value_dim=values) for (keys, values), time in seconds.items()]
    record(rows).write(curves / "a-pairs.json")
    record([row(*pair) for pair in MILLISECONDS.items()]).write(curves / "b.json")
    mixer: Any = SimpleNamespace(axis=SimpleNamespace(width=128), value_heads=2, value_dim=32)
    cut = speed_of_cut("delta_net", mixer, 64, 16)
    assert cut.advice.startswith("speed against key dim x value dim 128 x 32: 64 x 16 2.00x (NVIDIA X1: one layer")
    assert cut.speedups == {64: 2.0}
    assert speed_of_cut("delta_net", mixer, 64, 8) is None
    below = speeds_below("delta_net", mixer)
    assert below.advice.startswith(BELOW_128)
    assert "64 x 32 1.33x, 128 x 16 1.60x, 64 x 16 2.00x" in below.advice
    assert speed_of_cut("delta_net", mixer, 64).speedups == {64: pytest.approx(1.3, abs=0.01)}


def test_a_record_of_the_benchmark_is_a_curve():
    sizes = {"batch": 1, "length": 16, "hidden": 32, "heads": 2, "value_dim": 8, "rounds": 1, "device": "cpu"}
    timed = slimstate.bench_mixer(models=["delta_net"], key_dims=[8, 4], modes=["forward"], **sizes, progress=False)
    known = mixer_curve(timed, "delta_net")
    assert known.seconds == {row.key_dim: row.seconds for row in timed.rows}
    assert known.seconds.keys() == {8, 4}
    assert "forward over 1 x 16 tokens, hidden 32, 2 heads, value dim 8, float32" in known.advice(8, 4)
    assert timed.device in known.advice(8, 4)


def test_the_first_curve_that_covers_the_key_dims_is_used(curves):
    assert matching_curves("delta_net", 32) == {}
    for name, key_dims in {"b": (16, 32), "a": (32, 64), "c": (16, 256)}.items():
        record([row(key_dim, key_dim) for key_dim in key_dims]).write(curves / f"{name}.json")
    covering = {pair: matching_curves("delta_net", *pair) for pair in ((64, 32), (32, 16), (64, 16), (512, 16))}
    found = {pair: [set(known.seconds) for known in by_use.values()] for pair, by_use in covering.items()}
    assert found == {(64, 32): [{32, 64}], (32, 16): [{16, 32}], (64, 16): [{16, 256}], (512, 16): []}
    assert matching_curves("mamba2", 32) == {}


@pytest.mark.usefixtures("measured")
def test_inspect_shows_which_key_dims_are_faster(wide, succeed):
    assert BELOW_128 in " ".join(succeed("inspect", wide[128]).split())
    speed = json.loads(succeed("inspect", wide[128], "--json"))["speed"]
    assert (speed["device"], speed["source"], speed["advice"]) == ("NVIDIA X1", SOURCE.format(""), BELOW_128)
    assert list(map(int, speed["speedups"])) == list(range(120, 8, -8))
    assert speed["speedups"]["64"] == pytest.approx(1.3)


@pytest.mark.usefixtures("measured")
def test_every_way_to_prune_shows_what_the_key_dim_gains(wide, tmp_path, execute):
    cut, l1 = tmp_path / "cut", ("--method", "l1", "--key-dim", 77)
    for way in [(*l1, "--plan-only"), (*l1, "--dry-run"), (*l1, "--out", cut), ("--apply", cut, "--dry-run")]:
        code, out, err = execute("prune", wide[128], *way, "--json")
        assert (code, err.splitlines().count(TO_77)) == (0, 1), err
        speed = json.loads(out)["speed"]
        assert (speed["device"], speed["advice"]) == ("NVIDIA X1", TO_77)
        assert speed["speedups"] == {"77": pytest.approx(13 / 12.6)}
    assert f"\n\nSpeed: 1.03x ({SOURCE.format('; 77 taken as 80')}).\n\nMethod" in (cut / "README.md").read_text()


@pytest.mark.usefixtures("measured")
def test_a_layer_that_no_curve_covers_gets_no_advice(wide, folders, tmp_path, execute):
    for folder in (wide[256], folders["gated_deltanet-plain"], folders["qwen3_next-plain"]):
        assert slimstate.inspect(folder).speed is None
        assert "NVIDIA" not in execute("prune", folder, "--method", "l1", "--key-dim", 16, "--dry-run")[2]
    assert slimstate.prune(wide[128], tmp_path / "narrow", method="l1", key_dim=16).speed is not None
    assert slimstate.inspect(tmp_path / "narrow").speed is None  # nothing was timed below it
    for method, key_dim in (("l1", 8), ("random-rotation", 128)):
        assert slimstate.prune(wide[128], method=method, key_dim=key_dim).speed is None


@pytest.mark.parametrize("folder_exists", [True, False])
def test_without_curves_there_is_no_advice(folder_exists, wide, curves, tmp_path, succeed):
    if not folder_exists:
        curves.rmdir()
    assert "against key dim" not in " ".join(succeed("inspect", wide[128]).split())
    assert slimstate.prune(wide[128], tmp_path / "cut", method="l1", key_dim=64).speed is None
    assert "|\n\nMethod" in (tmp_path / "cut" / "README.md").read_text()


def test_curves_in_the_package_are_whole_records_of_a_gpu():
    for entry in widths.CURVES.iterdir():
        path = Path(str(entry))
        bench = json.loads(path.read_text())["bench"]
        if bench == "kernels":
            assert {row.mode for row in KernelRecord.read(path).rows} <= {"decode", "prefill"}
            continue
        if bench == "decode":
            assert {(64, 64), (64, 128), (128, 64)} < decoding_curve(DecodeRecord.read(path), "delta_net").pairs.keys()
            assert decoding_curve(DecodeRecord.read(path), "gla") is None
            continue
        record = MixerRecord.read(path)
        assert record.to_json()["kind"] == "bench"
        assert "CPU" not in record.kernels
        assert record.device in record.kernels
        assert "bench mixer" in record.command
        for model_type in record.settings["models"]:
            assert mixer_curve(record, model_type).seconds.keys() >= set(range(16, 129, 8))


def kernel_record() -> KernelRecord:
    """Decoding takes time in proportion to the key dim, prefill the same at all."""
    shape = {"name": "qwen3_5", "key_heads": 16, "value_heads": 48, "value_dim": 128}
    rows = [
        KernelRow(model="qwen3_5", key_dim=key_dim, mode=mode, seconds=seconds, quartiles=(seconds, seconds), rounds=3)
        for key_dim in range(128, 0, -16)
        for mode, seconds in (("decode", key_dim / 1e5), ("prefill", 1e-3))
    ]
    settings = {"shapes": [shape], "modes": ["decode", "prefill"], "sequences": 1024, "prompts": 8, "length": 2048}
    run = {"device": "NVIDIA X1", "dtype": "bfloat16", "kernels": "vLLM 1.2, Triton", "rounds": 3, "command": ""}
    return KernelRecord(**run, settings=settings, rows=tuple(rows), copy_bandwidth=1e12)


def test_advice_tells_decoding_from_prefill(curves):
    kernel_record().write(curves / "engine.json")
    assert matching_curves("qwen3_5", 128, 64).keys() == {"decoding", "prefill"}  # no curve of a whole layer
    cut = speed_of_cut("qwen3_5_text", MIXER, 64)
    decoding, prefill = cut.advice.split("; prefill: ")
    assert decoding.startswith("decoding: key dim 64 is 2.00x as fast as 128")
    assert "the kernel of vLLM 1.2, Triton by itself, a token for each of 1,024 sequences" in decoding
    assert prefill.startswith("key dim 64 runs at the speed of 128")
    assert cut.speedups == {64: pytest.approx(2)}
    below = speeds_below("qwen3_5", MIXER)
    assert [round(128 / key_dim / speedup, 6) for key_dim, speedup in below.speedups.items()] == [1] * 7
    assert "96 1.33x" in below.advice
    assert "prefill: speed against key dim 128, gains up to 4% left out: 112 to 16 no faster" in below.advice
    assert speed_of_cut("rwkv6", MIXER, 64) is None


@pytest.mark.parametrize(("value_heads", "value_dim"), [(23, 128), (97, 128), (48, 63), (48, 257)])
def test_a_layer_of_a_far_size_gets_no_advice(value_heads, value_dim, curves):
    kernel_record().write(curves / "engine.json")
    mixer = SimpleNamespace(axis=MIXER.axis, value_heads=value_heads, value_dim=value_dim)
    assert speed_of_cut("qwen3_5", mixer, 64) is None


@pytest.mark.parametrize("name", ["bench-decode", "bench-decode-sizes", "bench-decode-gated"])
def test_estimated_steps_are_within_the_stated_error_of_those_that_were_timed(name):
    record = json.loads((RECORDS / f"{name}.json").read_text())
    largest = {(row["model"], row["key_dim"]): row["batch"] for row in record["largest_batch"]}
    times = {}
    for row in (row for row in record["rows"] if row.get("seconds")):
        batch, caches = row["batch"], row["state_bytes"] + row["convolution_bytes"]
        weights = row["roofline_seconds"] * record["copy_bandwidth"] - 2 * batch * caches
        layers = read_shape(row["model"])["num_hidden_layers"]
        load = Load(parameters=round(weights / 2), layers=layers, state_bytes=row["state_bytes"])
        assert load.sequences() == pytest.approx(largest[row["model"], row["key_dim"]], rel=0.11)
        assert load.seconds(batch) == pytest.approx(row["seconds"], rel=0.17)
        times[row["model"], row["key_dim"], batch] = row["seconds"], load.seconds(batch)
    for (model, key_dim, batch), (measured, estimate) in times.items():
        whole = times.get((model, 2 * key_dim, batch))
        if whole is not None and batch >= 16:
            assert whole[1] / estimate == pytest.approx(whole[0] / measured, rel=0.1)


def test_experts_that_tokens_choose_are_read_once_and_long_contexts_gain_little(tmp_path, succeed):
    """Of 10 in 512 experts, one token chooses 10 and very many tokens choose all."""
    dense, routed = 10**9, 512 * 10**8
    load = Load(parameters=dense + routed, routed=routed, share=10 / 512, layers=0, state_bytes=0)
    assert load.seconds(1) == pytest.approx(2 * (dense + 10 * 10**8) / 4.2e12)
    chosen = (load.seconds(64) * 2.1e12 - dense) / 10**8
    assert chosen == pytest.approx(512 * (1 - (1 - 10 / 512) ** 64))
    record = json.loads((RECORDS / "gains.json").read_text())
    _, long = record["gains"]["Qwen3-Next-80B-A3B"]
    assert long["card"] == "2 H200"  # 159 GB of weights
    assert long["sequences"][1] / long["sequences"][0] == pytest.approx(840 / 804, rel=0.005)
    (path := tmp_path / "config.json").write_text(json.dumps(record["configs"]["Nemotron-H-8B"]))
    assert json.loads(succeed("inspect", path, "--json"))["gains"] == record["gains"]["Nemotron-H-8B"]
    assert "states in bf16" in succeed("inspect", path, "--state-dtype", "bf16")
    assert "little is gained at 32,768 tokens, where 84% of a sequence is KV cache" in succeed("inspect", path)
