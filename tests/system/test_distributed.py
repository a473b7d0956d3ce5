"""Two processes find what one finds, write once, speak once, and stop together."""

import json
from pathlib import Path

import pytest
import torch

import slimstate
import tiny
from launching import launch, options
from slimstate.core.evidence import EvidenceFile
from slimstate.models.devices import pick_device
from slimstate.records.evaluation import SweepRecord
from slimstate.system import distributed
from slimstate.system.errors import ModelError, PlanError

NAME = tiny.PLAIN[0]
CALIBRATION = {"samples": 9, "length": 1024}  # two windows at once on a CPU: five batches, the last one smaller
ONE_BATCH = {"samples": 2, "length": 64}
MEASURED = {"text_length": 96, "max_tokens": 384}
COMMANDS = """
import json, sys, time
from slimstate.cli import main
from slimstate.system.distributed import is_main

def tell_of_writing(event, args):
    if event in ("os.mkdir", "os.rename") and str(args[0]).startswith(root):
        print(event, args[0], flush=True)

root, commands = sys.argv[1], json.loads(sys.argv[2])
if not is_main():
    sys.addaudithook(tell_of_writing)
for words in commands:
    if "l1" in words and not is_main():
        time.sleep(1.5)  # time for the main process to be done too soon
    sys.argv = ["slimstate", *words]
    try:
        main()
    except SystemExit as stop:
        print(f"exit {stop.code or 0}", flush=True)
"""
CUTS = [
    pytest.param("drrqr", {}, "evidence", ("cut", "again"), id="a forward pass, and its evidence again"),
    pytest.param("grad", {}, "grad", ("grad",), id="a backward pass"),
    pytest.param("drrqr", ONE_BATCH, "one", ("one",), id="one process without a batch"),
]


def same_evidence(one: Path, several: Path) -> None:
    expected, found = EvidenceFile.open(one), EvidenceFile.open(several)
    assert (expected.model, expected.calibration) == (found.model, found.calibration)
    assert expected.evidence.keys() == found.evidence.keys()
    for layer, entry in expected.evidence.items():
        assert entry.tokens == found.evidence[layer].tokens
        for (name, x), (other, y) in zip(entry.tensors(), found.evidence[layer].tensors(), strict=True):
            assert name == other
            close = 1e-10 if x.dtype == torch.float64 else 1e-5
            torch.testing.assert_close(y, x, rtol=close, atol=close * float(x.abs().max()))


def same_model(one: Path, several: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in several.iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    assert shards
    assert all((one / name).read_bytes() == (several / name).read_bytes() for name in shards)
    plans = [json.loads((folder / "slimstate_plan.json").read_text()) for folder in (one, several)]
    kept = [{layer: entry["keep"] for layer, entry in plan["layers"].items()} for plan in plans]
    assert kept[0] == kept[1]
    assert plans[0]["calibration"] == plans[1]["calibration"]


def cut(folders, text_file, root: Path, method: str, **changes: object):
    """With one process, here: root/cut and root/evidence.safetensors."""
    settings = {"key_dim": 8, "data": str(text_file), "evidence": root / "evidence.safetensors", **CALIBRATION}
    return slimstate.prune(folders[NAME], root / "cut", method=method, **{**settings, **changes})


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> tuple[Path, Path]:
    """A model to which one letter is NaN, and a text with it in one window: one that the second process takes first."""
    root = tmp_path_factory.mktemp("poisoned")
    model, text = tiny.build(tiny.VARIANTS[NAME]), tiny.text(9 * 1024)
    with torch.no_grad():
        model.get_input_embeddings().weight[tiny.tokenizer()("Z")["input_ids"][0]] = torch.nan
    third = 1024 * int(torch.randperm(9, generator=torch.Generator().manual_seed(0))[2])
    (root / "text.txt").write_text(text[:third] + "Z" + text[third + 1 :])
    return tiny.save(model, root / "model"), root / "text.txt"


@pytest.fixture(scope="module")
def pair(folders, text_file, poisoned, tmp_path_factory):
    """One command after another in the same two processes: (folder, what they printed, what they complained of)."""
    root = tmp_path_factory.mktemp("pair")
    (root / "file").write_text("in the way")
    script = root / "commands.py"
    script.write_text(COMMANDS)
    size, key_dim = options(**CALIBRATION), options(key_dim=8)
    evidence = options(evidence=root / "evidence.safetensors")
    blocked = options(evidence=root / "file" / "evidence.safetensors")
    gradients = options(evidence=root / "grad.safetensors")
    model, data = str(folders[NAME]), [*options(data=text_file), *size]
    one_batch = options(data=text_file, evidence=root / "one.safetensors", **ONE_BATCH)
    judged = options(text=text_file, **MEASURED, methods="l1,drrqr", compressions=0.33)
    commands = [
        ["prune", model, *options(out=root / "cut"), *key_dim, *data, *evidence],
        ["prune", model, *options(out=root / "again"), *key_dim, *evidence],
        ["prune", model, *options(out=root / "one"), *key_dim, *one_batch],
        ["prune", model, *options(out=root / "l1", method="l1"), *key_dim],
        ["prune", model, *options(out=root / "l1", method="l1"), *key_dim],
        ["prune", model, *options(out=root / "blocked"), *key_dim, *data, *blocked],
        ["sweep", model, *options(out=root / "sweep"), *data, *judged],
        ["prune", model, *options(out=root / "grad", method="grad"), *key_dim, *data, *gradients, "--json"],
        ["prune", str(poisoned[0]), *options(out=root / "nan", data=poisoned[1]), *key_dim, *size],
    ]
    ended = launch(2, root, script, root, json.dumps(commands))
    assert [code for code, _, _ in ended] == [0, 0], ended
    return root, [out for _, out, _ in ended], [err for _, _, err in ended]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "changes", "evidence", "cuts"), CUTS)
def test_two_processes_cut_the_model_that_one_cuts(method, changes, evidence, cuts, pair, folders, text_file, tmp_path):
    root, (main, other), _ = pair
    expected = cut(folders, text_file, tmp_path, method, **changes)
    same_evidence(tmp_path / "evidence.safetensors", root / f"{evidence}.safetensors")
    for name in cuts:
        same_model(tmp_path / "cut", root / name)
    if method == "grad":  # with --json
        record = json.loads(main[main.index("{") : main.rindex("}") + 1])
        assert (record["out"], record["calibration"]) == (str(root / "grad"), expected.to_json()["calibration"])
        assert "{" not in other


@pytest.mark.slow
def test_two_processes_sweep_as_one(pair, folders, text_file, tmp_path):
    grid = {"methods": ("l1", "drrqr"), "compressions": (0.33,)}
    record = slimstate.sweep(folders[NAME], tmp_path, text=text_file, data=text_file, **CALIBRATION, **MEASURED, **grid)
    found = SweepRecord.read(pair[0] / "sweep" / "sweep.json")
    assert found.settings == record.settings
    for row, expected in zip(found.rows, record.rows, strict=True):
        assert row.key == expected.key
        for name in ("nats_per_token", "rank_utilisation", "kappa", "kappa_worst"):
            assert getattr(row, name) == pytest.approx(getattr(expected, name), rel=1e-6)
    same_evidence(tmp_path / "evidence.safetensors", pair[0] / "sweep" / "evidence.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (pair[0] / "sweep").iterdir()}


@pytest.mark.slow
def test_the_main_process_speaks_and_all_end_alike(pair):
    """The folder that is there, the file in the way and the NaN are refused, each time by both."""
    _, (main, other), errors = pair
    codes = [f"exit {code}" for code in (0, 0, 0, 0, 2, 2, 0, 0, 2)]
    assert other.splitlines() == codes
    assert [line for line in main.splitlines() if line.startswith("exit ")] == codes
    assert main.count("written to ") == 5
    assert [err.count("key dim 8 of 24") for err in errors] == [6, 0]
    assert [err.count("evidence saved to ") for err in errors] == [4, 0]


@pytest.mark.slow
def test_what_is_wrong_in_one_process_stops_both_in_words(pair, poisoned, tmp_path):
    root, _, errors = pair
    with pytest.raises(ModelError) as alone:
        slimstate.prune(poisoned[0], tmp_path / "cut", key_dim=8, data=str(poisoned[1]), **CALIBRATION)
    assert f"slimstate: {alone.value}" in errors[0].splitlines()
    assert f"{root / 'file'} is a file" in errors[0]
    assert f"{root / 'l1'} exists already" in errors[0]
    assert not (root / "blocked").exists()
    assert not (root / "nan").exists()
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_shares_are_all_there_is_and_never_overlap(monkeypatch):
    for count in (1, 2, 3, 8):
        monkeypatch.setenv("WORLD_SIZE", str(count))
        shares = []
        for rank in range(count):
            monkeypatch.setenv("RANK", str(rank))
            shares.append(distributed.share(range(5)))
        assert sorted(item for share in shares for item in share) == list(range(5))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_each_process_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(None) == pick_device("cuda") == torch.device("cuda")
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert pick_device(None) == pick_device("cuda") == torch.device("cuda", 1)
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(PlanError, match="3 processes for 2 GPUs"):
        pick_device(None)
