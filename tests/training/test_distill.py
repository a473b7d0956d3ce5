"""A distillation of the whole model after its reconstruction is used only where it helps on held-out windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import slimstate
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.file_names import CONFIG
from slimstate.records.training import RECONSTRUCTION, RECOVERY, ReconstructionRecord
from slimstate.system.errors import OutputError, PlanError
from slimstate.training import distill, session, tokens

NAME = "delta_net-plain"
SHORT = {"steps": 2, "batch": 2, "samples": 8, "length": 32}
RECONSTRUCT = {"reconstruct": True, **{f"reconstruct_{name}": value for name, value in SHORT.items()}}


@pytest.fixture
def prune(folders, text_file, monkeypatch):
    """Cut, reconstruct and distil, with a learning rate that helps in three steps."""
    monkeypatch.setattr(distill, "LEARNING_RATE", 1e-3)

    def run(out: Path, **changes):
        options = {"key_dim": 8, "data": text_file, "distill": 3, "progress": False, **RECONSTRUCT, **changes}
        return slimstate.prune(folders[NAME], out, **options)

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("helps", [True, False])
def test_a_distillation_is_used_where_it_helps(helps, prune, folders, tmp_path, monkeypatch):
    prune(tmp_path / "plain", distill=None)
    if not helps:
        nats = iter((1.0, 1.5, 0.5))  # before, after, and of the uncut model
        monkeypatch.setattr(tokens, "mean_nats", lambda *_: next(nats))
    out, plain = tmp_path / "out", weights(tmp_path / "plain")
    record = prune(out)
    distillation = record.reconstruction.distillation
    assert distillation.taken == (distillation.after < distillation.before) == helps
    assert ("not taken" in distillation.line()) != helps
    assert ReconstructionRecord.read(out / RECONSTRUCTION).distillation == distillation
    assert json.loads((out / CONFIG).read_text()).items() >= {"command": "prune", "distill": 3}.items()
    changed = {name for name, tensor in weights(out).items() if not torch.equal(tensor, plain[name])}
    mixers = tuple(f"{mixer.place_in_files}." for mixer in Checkpoint.open(out).mixers)
    assert bool(changed) == (out / RECOVERY).exists() == helps
    assert all(name.startswith(mixers) for name in changed)
    if helps:
        nats = json.loads((out / RECOVERY).read_text())["measured"]["nats"]["after"]
        assert nats == pytest.approx(distillation.after)
    assert names(tmp_path) == ["out", "plain"]


@pytest.mark.slow
def test_an_interrupted_distillation_continues_with_the_reconstruction(prune, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(distill.DistillationJob, "_distil", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prune(out)
    assert not out.exists()
    file = tmp_path / "out.distillation" / "reconstructed" / "out" / "config.json"
    time = file.stat().st_mtime_ns
    with pytest.raises(PlanError, match="started with other settings"):
        prune(out, distill=4)
    assert file.stat().st_mtime_ns == time
    monkeypatch.setattr("slimstate.reconstruction.reconstruct.ReconstructionJob.finish", interrupted)  # it is done
    assert prune(out).reconstruction.distillation.taken
    with pytest.raises(OutputError, match="exists already"):
        prune(out)


@pytest.mark.slow
def test_a_cut_that_exists_is_reconstructed_and_distilled(folders, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "LEARNING_RATE", 1e-3)
    slimstate.prune(folders[NAME], tmp_path / "cut", key_dim=8, method="l1", progress=False)
    record = slimstate.reconstruct(
        tmp_path / "cut", tmp_path / "out", data=text_file, distill=3, progress=False, **SHORT
    )
    assert record.distillation.taken
    assert record.config.items() >= {"command": "reconstruct", "distill": 3, "out": str(tmp_path / "out")}.items()


@pytest.mark.slow
def test_killed_after_its_last_step_or_after_the_move_it_ends_at_once(prune, tmp_path, monkeypatch):
    out, expected = tmp_path / "out", prune(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(distill, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prune(out)
    assert not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "run_training", interrupted)  # nothing is left to train
        empty = distill.DistillationFolder.empty
        patch.setattr(distill.DistillationFolder, "empty", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prune(out)
        assert (tmp_path / "out.distillation").is_dir()
        patch.setattr(distill.DistillationFolder, "empty", empty)
        record = prune(out)
    assert record.reconstruction.distillation == expected.reconstruction.distillation
    assert all(torch.equal(tensor, weights(out)[name]) for name, tensor in weights(tmp_path / "whole").items())
    assert names(tmp_path) == ["out", "whole"]


@pytest.mark.slow
def test_another_text_of_the_same_name_does_not_continue_it(prune, text_file, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(text_file.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(distill.DistillationJob, "_distil", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path / "out", data=text)
    text.write_text(text.read_text()[::-1])
    with pytest.raises(PlanError, match="started with other settings: windows sha256:"):
        prune(tmp_path / "out", data=text)


@pytest.mark.parametrize("mistake", [{"reconstruct_samples": 1}, {"reconstruct_length": 100_000}])
def test_an_error_before_the_first_layer_leaves_nothing(mistake, prune, tmp_path, monkeypatch):
    with pytest.raises(slimstate.SlimstateError):
        prune(tmp_path / "out", **mistake)
    monkeypatch.setattr("slimstate.reconstruction.walk.Walk.layers", lambda self: iter((1 / 0,)))
    with pytest.raises(ZeroDivisionError):
        prune(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_result_cannot_replace_the_cut_itself(folders, text_file, tmp_path):
    cut = tmp_path / "cut"
    slimstate.prune(folders[NAME], cut, key_dim=8, method="l1", progress=False)
    for out in (cut, cut / "within"):
        with pytest.raises(OutputError, match="output folder overlaps the model folder"):
            slimstate.reconstruct(cut, out, data=text_file, distill=1, force=True, progress=False, **SHORT)
    assert names(tmp_path) == ["cut"]
    assert not list(cut.glob("within*"))


@pytest.mark.slow
def test_the_output_may_have_the_name_of_a_working_file(prune, tmp_path):
    for name in ("distilled", "reconstructed", "settings.json"):
        prune(tmp_path / name)
    assert names(tmp_path) == ["distilled", "reconstructed", "settings.json"]
