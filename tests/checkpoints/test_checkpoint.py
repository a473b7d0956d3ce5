"""A folder is written completely or not at all, keeps what it should, and records where it came from."""

import errno
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import slimstate
import tiny
from forking import Fork
from launching import PATIENCE
from slimstate.checkpoints.reader import INDEX, Checkpoint
from slimstate.checkpoints.safetensors_io import TensorFileWriter
from slimstate.core.file_names import CONFIG, PLAN
from slimstate.models.load import load
from slimstate.records.plan import Plan
from slimstate.system.errors import MAX_LINE, ModelError, OutputError, PlanError
from tiny import names

pytestmark = pytest.mark.slow
NAME = tiny.PLAIN[0]
FULL_DISK = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
LAYERS = "model.layers"
DAMAGE = {
    f"{LAYERS}.1.attn.k_proj.weight": (lambda x: x.index_fill(0, torch.tensor([30]), torch.nan),
                                       "layer 1, head 1: .*NaN"),
    f"{LAYERS}.0.mlp.up_proj.weight": (lambda x: x * torch.inf, "layers.0.mlp.up_proj.weight holds NaN"),
    f"{LAYERS}.0.mlp.gate_proj.weight": (lambda x: x.clone().fill_(3e38), "gate_proj.weight holds .* above 1e"),
    f"{LAYERS}.0.attn.q_proj.weight": (lambda x: x[:-1].clone(), "q_proj.weight has 47 rows where the config needs 48"),
    f"{LAYERS}.1.mlp.up_proj.weight": (lambda x: x[:-1].clone(), r"\[95, 64\] where the config says \[96, 64\]"),
}  # fmt: skip


def cut(folder: Path, out: Path | None, **options):
    return slimstate.prune(folder, out, **{"method": "l1", "key_dim": 8, **options})


def width(folder: Path) -> int:
    return Checkpoint.open(folder).mixers[0].axis.width


@pytest.fixture
def model(folders) -> Path:
    return folders[NAME]


@pytest.fixture
def copied(model, tmp_path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


def test_shards_dtypes_and_other_files_are_kept(folders, tmp_path):
    model = tiny.build(tiny.VARIANTS[NAME]).to(torch.bfloat16)
    folder = tiny.save(model, tmp_path / "model", "60KB")
    (folder / "README.md").write_text("the card of the base model")
    (folder / "pytorch_model.bin").write_bytes(b"stale")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x").write_text("x")
    record = cut(folder, tmp_path / "cut")
    before, after = Checkpoint.open(folder), Checkpoint.open(tmp_path / "cut")
    assert len(before.files) > 1
    contents = [{name: list(file.tensors) for name, file in each.files.items()} for each in (before, after)]
    assert contents[0] == contents[1]
    assert {info.dtype for info in after.tensors.values()} == {info.dtype for info in before.tensors.values()}
    assert after.index["weight_map"] == before.index["weight_map"]
    assert after.index["metadata"]["total_size"] == sum(info.size for info in after.tensors.values())
    same = "tokenizer.json tokenizer_config.json chat_template.jinja generation_config.json notes/origin.md"
    for name in same.split():
        assert (folder / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()
    assert (tmp_path / "cut" / "README.base.md").read_text() == "the card of the base model"
    assert "key dim 8 instead of 24" in (tmp_path / "cut" / "README.md").read_text()
    assert record.left_out == ("pytorch_model.bin",)
    assert not (tmp_path / "cut" / "pytorch_model.bin").exists()
    assert not (tmp_path / "cut" / ".cache").exists()


def test_a_single_file_is_written_as_safetensors_itself_would(tmp_path):
    folder = tiny.save(tiny.build(tiny.VARIANTS[NAME]), tmp_path / "model")
    cut(folder, tmp_path / "cut")
    written = tmp_path / "cut" / "model.safetensors"
    save_file(load_file(written), tmp_path / "again.safetensors", {"format": "pt"})
    assert written.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["drrqr", "pca"])
def test_the_plan_alone_repeats_the_cut(method, model, text_file, tmp_path):
    options = {"method": method, "data": str(text_file), "samples": 4, "length": 64, "key_dim": 10}
    cut(model, tmp_path / "a" / "cut", **options)
    slimstate.prune(model, tmp_path / "b" / "cut", apply=tmp_path / "a" / "cut" / PLAN)
    for path in (tmp_path / "a" / "cut").rglob("*"):
        if path.is_file() and path.name != CONFIG:  # which names the options of its own run
            assert path.read_bytes() == (tmp_path / "b" / "cut" / path.relative_to(tmp_path / "a" / "cut")).read_bytes()


def test_a_plan_for_another_model_is_refused(folders, tmp_path):
    cut(folders[NAME], tmp_path / "cut")
    (tmp_path / "broken.json").write_text("{}")
    plans = {f"cut/{PLAN}": "another model", "broken.json": "not a slimstate plan",
             "missing.json": r"cannot read .*missing\.json: No such file"}  # fmt: skip
    for plan, message in plans.items():
        with pytest.raises(PlanError, match=message):
            slimstate.prune(folders[tiny.PLAIN[1]], tmp_path / "other", apply=tmp_path / plan)
    assert not (tmp_path / "other").exists()


def test_a_plan_carries_its_certificate(model, text_file, tmp_path):
    cut(model, tmp_path / "cut", method="drrqr", data=str(text_file), samples=4, length=64)
    plan = json.loads((tmp_path / "cut" / PLAN).read_text())
    for layer in plan["layers"].values():
        assert all(rho <= 1.5 for rho in layer["rho"])
        assert {"keep", "rho", "swaps", "condition_before", "condition_after"} == layer.keys()
    assert plan["options"] == {"f": 1.5}
    assert plan["calibration"]["samples"] == 4
    assert plan["model"]["fingerprint"] == Checkpoint.open(model).fingerprint


def test_cuts_chain(model, tmp_path):
    cut(model, tmp_path / "once", key_dim=12)
    cut(tmp_path / "once", tmp_path / "twice", key_dim=6)
    config = json.loads((tmp_path / "twice" / "config.json").read_text())["slimstate"]
    assert (config["width"], config["key_dim"]) == (12, 6)
    assert [(entry["width"], entry["key_dim"]) for entry in config["history"]] == [(24, 12)]
    plan = Plan.read(tmp_path / "twice" / PLAN)
    assert plan.parent["key_dim"] == 12
    assert plan.parent["model"]["source"] == str(model)
    model = load(tmp_path / "twice", device="cpu").model
    assert model(input_ids=tiny.token_ids()).logits.isfinite().all()


def cut_before(model: Path, out: Path) -> Path:
    """Write a cut with a file in it that a new one does not have."""
    cut(model, out, key_dim=12)
    (out / "precious").write_text("x")
    return out


def test_force_replaces_only_a_folder_that_slimstate_wrote(model, tmp_path):
    """A model of others is none, nor is a folder that merely looks like ours by a name or by its config."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    shutil.copytree(model, tmp_path / "model")
    shutil.copytree(model, tmp_path / "planned")
    (tmp_path / "planned" / PLAN).write_text("{}")
    cut(model, tmp_path / "tuned", key_dim=12)
    (tmp_path / "tuned" / PLAN).unlink()  # as `save_pretrained` of a cut model leaves it out
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("thesis", "model", "planned", "tuned"):
        with pytest.raises(OutputError, match=rf"{name} was not written by slimstate and is not replaced"):
            cut(model, tmp_path / name, force=True)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "empty").mkdir()
    cut(model, tmp_path / "empty", force=True)
    cut(model, tmp_path / "empty", key_dim=12, force=True)
    assert width(tmp_path / "empty") == 12


def test_what_others_write_there_in_the_meantime_is_not_replaced(model, tmp_path, monkeypatch):
    put = TensorFileWriter.put

    def moved_in(*arguments):
        (tmp_path / "cut").mkdir(exist_ok=True)
        (tmp_path / "cut" / "precious").write_text("x")
        return put(*arguments)

    monkeypatch.setattr(TensorFileWriter, "put", moved_in)
    with pytest.raises(OutputError, match="was not written by slimstate"):
        cut(model, tmp_path / "cut", force=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["cut", "precious"]


@pytest.mark.parametrize("exchanged", [True, False])
def test_an_existing_folder_is_kept_until_force_has_a_whole_new_one(exchanged, model, tmp_path, monkeypatch):
    """Also where two folders cannot be exchanged, and the old one goes before the new one comes."""
    out, rename = cut_before(model, tmp_path / "cut"), Path.rename

    def interrupted(path, target):
        if ".partial-" in path.name and not path.name.endswith("-old"):
            raise KeyboardInterrupt
        return rename(path, target)

    with pytest.raises(OutputError, match="exists already"):
        cut(model, out)
    failures = [(TensorFileWriter, "put", FULL_DISK, pytest.raises(OutputError, match="no space left"))]
    if not exchanged:
        monkeypatch.setattr("slimstate.system.atomic.ctypes.CDLL", lambda *_, **__: object())
        failures.append((Path, "rename", interrupted, pytest.raises(KeyboardInterrupt)))
    for place, name, failure, raised in failures:
        with monkeypatch.context() as patch, raised:
            patch.setattr(place, name, failure)
            cut(model, out, force=True)
        assert (out / "precious").read_text() == "x"
        assert names(tmp_path) == ["cut"]
    cut(model, out, force=True)
    assert not (out / "precious").exists()
    assert width(out) == 8
    assert names(tmp_path) == ["cut"]


def test_unchanged_tensors_are_written_while_the_model_runs(model, text_file, tmp_path, monkeypatch):
    gathering, seen = importlib.import_module("slimstate.pruning.evidence"), {}
    original = Checkpoint.open(model)
    missing = [name for name in original.tensors if "mlp" in name]

    def watched(runtime, *rest):
        (partial,) = tmp_path.glob(".cut.partial-*")
        seen.update({shard.name: shard.stat().st_size for shard in partial.glob("*.safetensors")})
        assert not (partial / "config.json").exists()
        ends = time.monotonic() + 60
        while missing and time.monotonic() < ends:
            tensors = {name: each for shard in seen for name, each in load_file(partial / shard).items()}
            missing[:] = [name for name in missing if not torch.equal(tensors[name], original.read(name))]
        return calibrate(runtime, *rest)

    calibrate = gathering.calibrate
    monkeypatch.setattr(gathering, "calibrate", watched)
    assert missing
    cut(model, tmp_path / "cut", method="drrqr", data=str(text_file), samples=4, length=64)
    assert not missing
    assert seen == {path.name: path.stat().st_size for path in (tmp_path / "cut").glob("*.safetensors")}
    assert names(tmp_path) == ["cut"]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), OSError(errno.EIO, "the text is gone"), MemoryError()])
def test_a_calibration_that_ends_early_leaves_nothing(end, model, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.pruning.evidence.calibrate", Mock(side_effect=end))
    with pytest.raises(type(end)) as raised:  # unchanged: it does not concern the folder that was being written
        cut(model, tmp_path / "cut", method="drrqr", data=str(text_file), samples=4, length=64)
    assert raised.value is end
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_before_the_model_runs(model, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.pruning.evidence.load_with", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match=r"no space left: the new model needs 0\.\d+ MiB, and 0.00095 MiB are free"):
        cut(model, tmp_path / "cut", method="drrqr", data=str(text_file), samples=4, length=64)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_behind_is_cleared_or_comes_back(model, tmp_path):
    out, host = tmp_path / "cut", socket.gethostname()
    dead = subprocess.check_output([sys.executable, "-c", "import os; print(os.getpid())"], text=True)
    hidden = [f".cut.partial-{host}-{os.getpid()}", f".cut.partial-{host}-{dead.strip()}"]
    for name in hidden:
        (tmp_path / name).mkdir()
    aside = tmp_path / f"{hidden[1]}-old"  # killed between the two steps that replace a folder
    cut_before(model, tmp_path / "earlier").rename(aside)
    with pytest.raises(OutputError, match="exists already"):  # the old one is back
        cut(model, out)
    assert names(tmp_path) == ["cut"]
    assert (out / "precious").read_text() == "x"
    cut(model, out, force=True)
    assert names(tmp_path) == ["cut"]


def test_folders_that_were_created_for_a_failed_output_are_removed(model, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(TensorFileWriter, "put", FULL_DISK)
        with pytest.raises(OutputError, match="no space left"):
            cut(model, tmp_path / "mine" / "new" / "newer" / "cut")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    for long in (Path("new", "n" * 300, "cut"), "n" * 300):
        with pytest.raises(OutputError, match="File name too long"):
            cut(model, tmp_path / "mine" / long)
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    cut(model, tmp_path / "mine" / "new" / "newer" / "cut")
    assert width(tmp_path / "mine" / "new" / "newer" / "cut") == 8


def test_a_plan_that_contradicts_itself_or_has_other_types_is_refused_in_a_line(model, tmp_path):
    cut(model, tmp_path / "cut", key_dim=12)
    plan, long = json.loads((tmp_path / "cut" / PLAN).read_text()), "x" * 50_000
    layers, sizes = plan["layers"], r"says key dim|key_dim(: expected| must be at most)"
    shorter = {"keep": [head[:-1] for head in layers["1"]["keep"]]}
    for change, words in (
        *(({"key_dim": value}, sizes) for value in (8, 16, 0, -1, "12")),
        ({"width": 32}, sizes),
        ({"layers": layers | {"1": layers["1"] | shorter}}, sizes),
        ({"layers": layers | {"0": layers["0"] | {"rho": "x"}}}, "not a slimstate plan"),
        ({"layers": {"0": {"keep": [[0]]}}}, ""),
        *(({name: 5}, "") for name in ("versions", "calibration", "model", "parent")),
        *(({name: [1]}, "") for name in ("parent", "score")),
        ({"method": long}, ""),
        ({"model": {"source": long, "fingerprint": long}}, ""),
    ):
        (tmp_path / "plan.json").write_text(json.dumps({**plan, **change}))
        with pytest.raises(PlanError, match=words) as error:
            slimstate.prune(model, tmp_path / "again", apply=tmp_path / "plan.json")
        assert len(str(error.value)) <= MAX_LINE
    assert not (tmp_path / "again").exists()


def test_a_shard_that_shrinks_while_it_is_read_is_noticed(copied):
    file = next(iter(Checkpoint.open(copied).files.values()))
    file.path.write_bytes(file.path.read_bytes()[:-10])
    last = list(file.tensors)[-1]
    for read in (file.read, lambda name: list(file.blocks(name))):
        with pytest.raises(ModelError, match="became shorter"):
            read(last)


def test_neither_a_link_nor_the_model_itself_is_replaced(model, tmp_path):
    (tmp_path / "real").mkdir()
    for target in ("real", "nowhere"):
        (tmp_path / f"link-to-{target}").symlink_to(tmp_path / target)
        with pytest.raises(OutputError, match="is a link"):
            cut(model, tmp_path / f"link-to-{target}", force=True)
    for out in (model, model / "inside", model.parent):
        with pytest.raises(OutputError, match="overlaps the model folder"):
            cut(model, out, force=True)


def test_a_dry_run_writes_nothing(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = cut(model, None)
    assert (record.key_dim, record.out) == (8, None)
    assert names(tmp_path) == []


def damage(folder: Path, name: str, change) -> None:
    shard = json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(folder / shard)
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / shard, {"format": "pt"})


@pytest.mark.parametrize("tensor", sorted(DAMAGE))
def test_damaged_weights_are_named_and_nothing_is_written(tensor, copied, tmp_path):
    change, message = DAMAGE[tensor]
    damage(copied, tensor, change)
    with pytest.raises(ModelError, match=message):
        cut(copied, tmp_path / "cut")
    assert names(tmp_path) == ["model"]


def test_layers_that_the_config_does_not_count_are_refused(copied, tmp_path):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(ModelError, match=r"has a tensor model\.layers\.1\..*, which its config has no place for"):
        cut(copied, tmp_path / "cut")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_bad_value_among_many_is_detected(dtype, copied, tmp_path):
    place = torch.tensor(5), torch.tensor(7)
    for bad in (torch.nan, torch.inf, -torch.inf):
        value = torch.tensor(bad, dtype=dtype)
        damage(copied, f"{LAYERS}.0.mlp.up_proj.weight", lambda x, value=value: x.to(dtype).index_put(place, value))
        with pytest.raises(ModelError, match="holds NaN or infinite"):
            cut(copied, tmp_path / "cut")


def test_a_missing_or_truncated_shard_is_named(copied, tmp_path):
    shard = sorted(copied.glob("*.safetensors"))[0]
    for data, message in ((shard.read_bytes()[:-100], "is truncated"), (b"abc", "is truncated"), (None, "is missing")):
        shard.unlink() if data is None else shard.write_bytes(data)
        with pytest.raises(ModelError, match=f"{shard.name} {message}"):
            cut(copied, tmp_path / "cut")


def test_evidence_is_used_again_and_refused_when_stale(folders, text_file, tmp_path, monkeypatch):
    file = tmp_path / "evidence.safetensors"
    data = {"data": str(text_file), "samples": 4, "length": 64}
    first = cut(folders[NAME], tmp_path / "a", method="drrqr", evidence=file, **data)
    monkeypatch.setattr("slimstate.pruning.evidence.load_with", None)  # no model may be loaded any more
    again = cut(folders[NAME], tmp_path / "b", method="drrqr", evidence=file)
    assert first.certificate == again.certificate
    cut(folders[NAME], tmp_path / "c", method="s-wanda", evidence=file)
    with pytest.raises(slimstate.SlimstateError, match="no gradient evidence"):
        cut(folders[NAME], tmp_path / "d", method="grad", evidence=file)
    with pytest.raises(slimstate.SlimstateError, match="another model"):
        cut(folders[tiny.PLAIN[1]], tmp_path / "d", method="drrqr", evidence=file)
    with pytest.raises(slimstate.SlimstateError, match="other tokens"):
        cut(folders[NAME], tmp_path / "d", method="drrqr", evidence=file, **{**data, "samples": 3})
    monkeypatch.undo()
    cut(folders[NAME], tmp_path / "d", method="grad", evidence=file, **data)
    cut(folders[NAME], tmp_path / "e", method="drrqr", evidence=file)


def test_a_killed_prune_leaves_nothing_that_looks_finished(model, tmp_path, monkeypatch):
    """kill -9 at random moments of the writing; then a rerun works and clears up."""
    place, began, put, generator = tmp_path / "place", tmp_path / "began", TensorFileWriter.put, random.Random(0)
    out = place / "cut"
    place.mkdir()
    cut(model, tmp_path / "whole")

    def slow(*arguments):
        began.touch()
        time.sleep(0.02)
        put(*arguments)

    monkeypatch.setattr(TensorFileWriter, "put", slow)
    for _ in range(6):
        shutil.rmtree(out, ignore_errors=True)
        began.unlink(missing_ok=True)
        process = Fork.start(lambda: cut(model, out), tmp_path / "errors")
        while not began.exists():
            assert process.poll(PATIENCE) is None
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.15))
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)
        if out.exists():
            assert (width(out), names(out)) == (8, names(tmp_path / "whole"))
        for path in (out, *place.glob(".cut*")):
            if path.exists() and not (path / "config.json").exists():
                with pytest.raises(ModelError):
                    Checkpoint.open(path)
    monkeypatch.undo()
    cut(model, out, force=True)
    assert names(place) == ["cut"]


def test_a_hub_model_is_inspected_by_its_headers_alone(model, monkeypatch):
    import huggingface_hub

    def get_safetensors_metadata(_, repository):
        folder = Checkpoint.open(model)
        tensors = {
            name: SimpleNamespace(dtype=info.dtype, shape=list(info.shape), data_offsets=(0, info.size))
            for name, info in folder.tensors.items()
        }
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors, metadata={})})

    monkeypatch.setattr("slimstate.system.hub.is_reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name: model / name)
    monkeypatch.setattr(huggingface_hub.HfApi, "file_exists", lambda *_: False)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", get_safetensors_metadata)
    remote, local = slimstate.inspect("someone/model"), slimstate.inspect(model)
    assert remote == replace(local, model="someone/model")


def test_a_model_saved_by_the_names_of_the_running_model_is_cut(folders, tmp_path):
    model = tiny.build(tiny.VARIANTS["nemotron_h-plain"])
    model.save_pretrained(tmp_path / "model", save_original_format=False)
    for name in ("model", folders["nemotron_h-plain"]):
        slimstate.prune(tmp_path / name, tmp_path / f"{len(names(tmp_path))}", method="l1", key_dim=8, progress=False)
    native, stored = (tiny.read_tensors(tmp_path / name) for name in ("1", "2"))
    for name, tensor in native.items():  # experts are stored together here
        stored_name = name.replace("model.", "backbone.", 1)
        assert "experts" in name or tensor.shape == stored[stored_name].shape


def test_a_lone_shard_without_its_index_is_named(copied, tmp_path):
    (copied / INDEX).unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        Checkpoint.open(copied)


def test_shards_in_a_subfolder_stay_there(copied, tmp_path):
    index = json.loads((copied / INDEX).read_text())
    (copied / "part").mkdir()
    for name in set(index["weight_map"].values()):
        (copied / name).rename(copied / "part" / name)
    index["weight_map"] = {tensor: f"part/{name}" for tensor, name in index["weight_map"].items()}
    (copied / INDEX).write_text(json.dumps(index))
    cut(copied, tmp_path / "cut")
    assert width(tmp_path / "cut") == 8
