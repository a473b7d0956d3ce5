"""A folder is written whole or not at all, keeps what it should, and remembers where it came from."""

from __future__ import annotations

import errno
import importlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import slimstate
import tiny
from launching import PATIENCE, Program
from slimstate.checkpoints.reader import INDEX, Checkpoint
from slimstate.checkpoints.safetensors_io import Rewriting, TensorFile
from slimstate.core.file_names import CONFIG, PLAN
from slimstate.models.load import load
from slimstate.records.cut import CutRecord
from slimstate.records.plan import Plan
from slimstate.system.errors import ModelError, OutputError, PlanError

NAME = tiny.PLAIN[0]


def cut(folder: Path, out: Path | None, **options) -> CutRecord:
    return slimstate.prune(folder, out, **{"method": "l1", "key_dim": 8, **options})


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
    assert {name: list(file.tensors) for name, file in before.files.items()} == {
        name: list(file.tensors) for name, file in after.files.items()
    }
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


def test_the_plan_alone_repeats_the_cut(folders, text_file, tmp_path):
    options = {"method": "drrqr", "data": str(text_file), "samples": 4, "length": 64, "key_dim": 10}
    cut(folders[NAME], tmp_path / "a" / "cut", **options)
    slimstate.prune(folders[NAME], tmp_path / "b" / "cut", apply=tmp_path / "a" / "cut" / PLAN)
    for path in (tmp_path / "a" / "cut").rglob("*"):
        if path.is_file() and path.name != CONFIG:  # which names the options of its own run
            assert path.read_bytes() == (tmp_path / "b" / "cut" / path.relative_to(tmp_path / "a" / "cut")).read_bytes()


def test_a_plan_for_another_model_is_refused(folders, tmp_path):
    cut(folders[NAME], tmp_path / "cut")
    with pytest.raises(PlanError, match="another model"):
        slimstate.prune(folders[tiny.PLAIN[1]], tmp_path / "other", apply=tmp_path / "cut" / PLAN)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(PlanError, match="not a slimstate plan"):
        slimstate.prune(folders[NAME], tmp_path / "other", apply=tmp_path / "broken.json")
    with pytest.raises(PlanError, match=r"cannot read .*missing\.json: No such file"):
        slimstate.prune(folders[NAME], tmp_path / "other", apply=tmp_path / "missing.json")
    assert not (tmp_path / "other").exists()


def test_a_plan_carries_its_certificate(folders, text_file, tmp_path):
    cut(folders[NAME], tmp_path / "cut", method="drrqr", data=str(text_file), samples=4, length=64)
    plan = json.loads((tmp_path / "cut" / PLAN).read_text())
    for layer in plan["layers"].values():
        assert all(rho <= 1.5 for rho in layer["rho"])
        assert {"keep", "rho", "swaps", "condition_before", "condition_after"} == layer.keys()
    assert plan["options"] == {"f": 1.5}
    assert plan["calibration"]["samples"] == 4
    assert plan["model"]["fingerprint"] == Checkpoint.open(folders[NAME]).fingerprint


def test_cuts_chain(folders, tmp_path):
    cut(folders[NAME], tmp_path / "once", key_dim=12)
    cut(tmp_path / "once", tmp_path / "twice", key_dim=6)
    config = json.loads((tmp_path / "twice" / "config.json").read_text())["slimstate"]
    assert (config["width"], config["key_dim"]) == (12, 6)
    assert [(entry["width"], entry["key_dim"]) for entry in config["history"]] == [(24, 12)]
    plan = Plan.read(tmp_path / "twice" / PLAN)
    assert plan.parent["key_dim"] == 12
    assert plan.parent["model"]["source"] == str(folders[NAME])
    model = load(tmp_path / "twice", device="cpu").model
    assert model(input_ids=tiny.token_ids()).logits.isfinite().all()


def full_disk(*_) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def cut_before(folders, out: Path) -> Path:
    """A folder that slimstate wrote, with something in it that a new one does not have."""
    cut(folders[NAME], out, key_dim=12)
    (out / "precious").write_text("x")
    return out


def test_force_replaces_only_a_folder_that_slimstate_wrote(folders, tmp_path):
    """A model of others is none, nor is a folder that merely looks like ours by a name or by its config."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    shutil.copytree(folders[NAME], tmp_path / "model")
    shutil.copytree(folders[NAME], tmp_path / "planned")
    (tmp_path / "planned" / PLAN).write_text("{}")
    cut(folders[NAME], tmp_path / "tuned", key_dim=12)
    (tmp_path / "tuned" / PLAN).unlink()  # as `save_pretrained` of a cut model leaves it out
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("thesis", "model", "planned", "tuned"):
        with pytest.raises(OutputError, match=rf"{name} was not written by slimstate and is not replaced"):
            cut(folders[NAME], tmp_path / name, force=True)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "empty").mkdir()
    cut(folders[NAME], tmp_path / "empty", force=True)
    cut(folders[NAME], tmp_path / "empty", key_dim=12, force=True)
    assert Checkpoint.open(tmp_path / "empty").mixers[0].axis.width == 12


def test_what_others_put_there_meanwhile_is_not_replaced(folders, tmp_path, monkeypatch):
    put = Rewriting.put

    def moved_in(*arguments):
        (tmp_path / "cut").mkdir(exist_ok=True)
        (tmp_path / "cut" / "precious").write_text("x")
        return put(*arguments)

    monkeypatch.setattr(Rewriting, "put", moved_in)
    with pytest.raises(OutputError, match="was not written by slimstate"):
        cut(folders[NAME], tmp_path / "cut", force=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["cut", "precious"]


def test_an_existing_folder_is_kept_until_force_has_a_whole_new_one(folders, tmp_path, monkeypatch):
    out = cut_before(folders, tmp_path / "cut")
    with pytest.raises(OutputError, match="exists already"):
        cut(folders[NAME], out)
    with monkeypatch.context() as patched:
        patched.setattr(Rewriting, "put", full_disk)
        with pytest.raises(OutputError, match="no space left"):
            cut(folders[NAME], out, force=True)
    assert (out / "precious").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]
    cut(folders[NAME], out, force=True)
    assert not (out / "precious").exists()
    assert Checkpoint.open(out).mixers[0].axis.width == 8
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


def test_what_stays_is_written_while_the_model_runs(folders, text_file, tmp_path, monkeypatch):
    gathering, seen = importlib.import_module("slimstate.pruning.evidence"), {}
    original = Checkpoint.open(folders[NAME])
    missing = [name for name in original.tensors if "mlp" in name]

    def watched(runtime, *rest):
        (partial,) = tmp_path.glob(".cut.partial-*")
        seen.update({shard.name: shard.stat().st_size for shard in partial.glob("*.safetensors")})
        assert not (partial / "config.json").exists()
        ends = time.monotonic() + 60
        while missing and time.monotonic() < ends:
            found = {name: each for shard in seen for name, each in load_file(partial / shard).items()}
            missing[:] = [name for name in missing if not torch.equal(found[name], original.read(name))]
        return calibrate(runtime, *rest)

    calibrate = gathering.calibrate
    monkeypatch.setattr(gathering, "calibrate", watched)
    data = {"data": str(text_file), "samples": 4, "length": 64}
    assert missing
    cut(folders[NAME], tmp_path / "cut", method="drrqr", **data)
    assert not missing
    assert seen == {path.name: path.stat().st_size for path in (tmp_path / "cut").glob("*.safetensors")}
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), OSError(errno.EIO, "the text is gone"), MemoryError()])
def test_a_calibration_that_ends_early_leaves_nothing(end, folders, text_file, tmp_path, monkeypatch):
    def ends(*_):
        raise end

    monkeypatch.setattr("slimstate.pruning.evidence.calibrate", ends)
    with pytest.raises(type(end)) as raised:  # as it was: it says nothing of the folder that was being written
        cut(folders[NAME], tmp_path / "cut", method="drrqr", data=str(text_file), samples=4, length=64)
    assert raised.value is end
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_before_the_model_runs(folders, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.pruning.evidence.load_with", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match="no space left: the new model needs"):
        cut(folders[NAME], tmp_path / "cut", method="drrqr", data=str(text_file), samples=4, length=64)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_a_link_is_refused(folders, tmp_path):
    (tmp_path / "real").mkdir()
    for target in ("real", "nowhere"):
        link = tmp_path / f"link-to-{target}"
        link.symlink_to(tmp_path / target)
        with pytest.raises(OutputError, match="is a link"):
            cut(folders[NAME], link, force=True)


def test_what_a_killed_run_left_behind_is_cleared_or_comes_back(folders, tmp_path):
    out, host = tmp_path / "cut", socket.gethostname()
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    ).stdout
    names = [f".cut.partial-{host}-{os.getpid()}", f".cut.partial-{host}-{dead.strip()}"]
    for name in names:
        (tmp_path / name).mkdir()
    aside = tmp_path / f"{names[1]}-old"  # killed between the two steps that replace a folder
    cut_before(folders, tmp_path / "earlier").rename(aside)
    with pytest.raises(OutputError, match="exists already"):  # the old one is back
        cut(folders[NAME], out)
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]
    assert (out / "precious").read_text() == "x"
    cut(folders[NAME], out, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


def test_a_failed_exchange_gives_the_old_folder_back(folders, tmp_path, monkeypatch):
    out, rename = cut_before(folders, tmp_path / "cut"), Path.rename

    def interrupted(path, target):
        if ".partial-" in path.name and not path.name.endswith("-old"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr("slimstate.system.atomic.ctypes.CDLL", lambda *_, **__: object())
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cut(folders[NAME], out, force=True)
    assert (out / "precious").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


def test_folders_made_for_an_output_that_never_came_are_gone(folders, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("slimstate.checkpoints.safetensors_io.Rewriting.put", full)
        with pytest.raises(OutputError, match="no space left"):
            cut(folders[NAME], tmp_path / "mine" / "new" / "newer" / "cut")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with pytest.raises(OutputError, match="File name too long"):
        cut(folders[NAME], tmp_path / "mine" / "new" / ("n" * 300) / "cut")
    with pytest.raises(OutputError, match="File name too long"):
        cut(folders[NAME], tmp_path / "mine" / ("n" * 300))
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    cut(folders[NAME], tmp_path / "mine" / "new" / "newer" / "cut")
    assert Checkpoint.open(tmp_path / "mine" / "new" / "newer" / "cut").mixers[0].axis.width == 8


def test_a_plan_that_contradicts_itself_is_refused(folders, tmp_path):
    cut(folders[NAME], tmp_path / "cut", key_dim=12)
    text = (tmp_path / "cut" / PLAN).read_text()

    def shorter(plan):
        layer = plan["layers"]["1"]
        layer["keep"] = [head[:-1] for head in layer["keep"]]

    changes = [lambda plan, value=value: plan.update(key_dim=value) for value in (8, 16, 0, -1, "12")]
    for change in (*changes, shorter, lambda plan: plan.update(width=32)):
        plan = json.loads(text)
        change(plan)
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        with pytest.raises(PlanError, match=r"says key dim|key_dim(: expected| must be at most)"):
            slimstate.prune(folders[NAME], tmp_path / "again", apply=tmp_path / "plan.json")
    assert not (tmp_path / "again").exists()


def test_a_header_that_contradicts_itself_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match="a has 8 bytes, which does not fit"):
        TensorFile.open(path)


def test_a_shard_that_shrinks_while_it_is_read_is_noticed(folders, tmp_path):
    shutil.copytree(folders[NAME], tmp_path / "model")
    checkpoint = Checkpoint.open(tmp_path / "model")
    file = next(iter(checkpoint.files.values()))
    file.path.write_bytes(file.path.read_bytes()[:-10])
    last = list(file.tensors)[-1]
    with pytest.raises(ModelError, match="became shorter"):
        file.read(last)
    with pytest.raises(ModelError, match="became shorter"):
        list(file.blocks(last))


def test_force_works_where_folders_cannot_be_exchanged(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.system.atomic.ctypes.CDLL", lambda *_, **__: object())
    for key_dim in (8, 6):
        cut(folders[NAME], tmp_path / "cut", key_dim=key_dim, force=True)
    assert Checkpoint.open(tmp_path / "cut").mixers[0].axis.width == 6
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


def test_the_model_itself_is_never_the_output(folders):
    for out in (folders[NAME], folders[NAME] / "inside", folders[NAME].parent):
        with pytest.raises(OutputError, match="overlaps the model folder"):
            cut(folders[NAME], out, force=True)


def test_a_dry_run_writes_nothing(folders, tmp_path):
    record = cut(folders[NAME], None)
    assert (record.key_dim, record.out) == (8, None)
    assert list(tmp_path.iterdir()) == []


def damaged(folder: Path, out: Path, name: str, change) -> Path:
    """A copy of a model with one tensor changed."""
    import shutil

    shutil.copytree(folder, out)
    shard = json.loads((out / INDEX).read_text())["weight_map"][name]
    tensors = load_file(out / shard)
    tensors[name] = change(tensors[name])
    save_file(tensors, out / shard, {"format": "pt"})
    return out


def one_row_of_nan(weight: torch.Tensor) -> torch.Tensor:
    return weight.index_fill(0, torch.tensor([30]), torch.nan)


LAYERS = "model.layers"
DAMAGE = {
    f"{LAYERS}.1.attn.k_proj.weight": (one_row_of_nan, "layer 1, head 1: .*NaN"),
    f"{LAYERS}.0.mlp.up_proj.weight": (lambda x: x * torch.inf, "layers.0.mlp.up_proj.weight holds NaN"),
    f"{LAYERS}.0.attn.q_proj.weight": (lambda x: x[:-1].clone(), "q_proj.weight has 47 rows where the config needs 48"),
    f"{LAYERS}.1.mlp.up_proj.weight": (lambda x: x[:-1].clone(), r"\[95, 64\] where the config says \[96, 64\]"),
}


@pytest.mark.parametrize("tensor", sorted(DAMAGE))
def test_damaged_weights_are_named_and_nothing_is_written(tensor, folders, tmp_path):
    change, message = DAMAGE[tensor]
    folder = damaged(folders[NAME], tmp_path / "model", tensor, change)
    with pytest.raises(ModelError, match=message):
        cut(folder, tmp_path / "cut")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_bad_value_among_many_is_found(dtype, folders, tmp_path):
    name = f"{LAYERS}.0.mlp.up_proj.weight"
    for bad in (torch.nan, torch.inf, -torch.inf):
        folder = damaged(folders[NAME], tmp_path / "model", name, lambda x, bad=bad: x.to(dtype).index_put(
            (torch.tensor(5), torch.tensor(7)), torch.tensor(bad, dtype=dtype)))  # fmt: skip
        with pytest.raises(ModelError, match="holds NaN or infinite"):
            cut(folder, tmp_path / "cut")
        shutil.rmtree(folder)


def test_a_missing_or_truncated_shard_is_named(folders, tmp_path):
    import shutil

    shutil.copytree(folders[NAME], tmp_path / "model")
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ModelError, match=f"{shard.name} is truncated"):
        cut(tmp_path / "model", tmp_path / "cut")
    shard.write_bytes(b"abc")
    with pytest.raises(ModelError, match=f"{shard.name} is truncated"):
        cut(tmp_path / "model", tmp_path / "cut")
    shard.unlink()
    with pytest.raises(ModelError, match=f"shard {shard.name} is missing"):
        cut(tmp_path / "model", tmp_path / "cut")


@pytest.mark.slow
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


SLOW_PRUNE = """
import pathlib, sys, time, slimstate
from slimstate.checkpoints.safetensors_io import Rewriting
model, out, began = sys.argv[1:]
write = Rewriting.put
def slow(*given):
    pathlib.Path(began).touch()
    time.sleep(0.02)
    write(*given)
Rewriting.put = slow
slimstate.prune(model, out, method="l1", key_dim=8)
"""


@pytest.mark.slow
def test_a_killed_prune_leaves_nothing_that_looks_finished(folders, tmp_path):
    """kill -9 at random moments of the writing; then a rerun works and clears up."""
    place, script, generator = tmp_path / "place", tmp_path / "prune.py", random.Random(0)
    out = place / "cut"
    place.mkdir()
    script.write_text(SLOW_PRUNE)
    for number in range(6):
        shutil.rmtree(out, ignore_errors=True)
        began, until = tmp_path / f"began-{number}", time.monotonic() + PATIENCE
        process = Program(script, folders[NAME], out, began)
        while not began.exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.15))
        process.kill()
        if out.exists():
            assert Checkpoint.open(out).mixers[0].axis.width == 8
            assert len(list(out.iterdir())) == len(list(folders[NAME].iterdir())) + 2
        for path in (out, *place.glob(".cut*")):
            if path.exists() and not (path / "config.json").exists():
                with pytest.raises(ModelError):
                    Checkpoint.open(path)
    cut(folders[NAME], out, force=True)
    assert [path.name for path in place.iterdir()] == ["cut"]


def test_a_hub_model_is_inspected_by_its_headers_alone(folders, monkeypatch):
    import huggingface_hub

    def get_safetensors_metadata(_, repository):
        folder = Checkpoint.open(folders[NAME])
        tensors = {
            name: SimpleNamespace(dtype=info.dtype, shape=list(info.shape), data_offsets=(0, info.size))
            for name, info in folder.tensors.items()
        }
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors, metadata={})})

    monkeypatch.setattr("slimstate.system.hub.reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name: folders[NAME] / name)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", get_safetensors_metadata)
    remote, local = slimstate.inspect("someone/model"), slimstate.inspect(folders[NAME])
    assert remote == replace(local, model="someone/model")


def test_shards_in_a_subfolder_stay_there(folders, tmp_path):
    import shutil

    shutil.copytree(folders[NAME], tmp_path / "model")
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    (tmp_path / "model" / "part").mkdir()
    for name in set(index["weight_map"].values()):
        (tmp_path / "model" / name).rename(tmp_path / "model" / "part" / name)
    index["weight_map"] = {tensor: f"part/{name}" for tensor, name in index["weight_map"].items()}
    (tmp_path / "model" / INDEX).write_text(json.dumps(index))
    cut(tmp_path / "model", tmp_path / "cut")
    assert Checkpoint.open(tmp_path / "cut").mixers[0].axis.width == 8
