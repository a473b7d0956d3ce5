"""A distillation of the whole model after its reconstruction: better on windows that are held out, or not taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import slimstate
from slimstate import CutOptions, ReconstructOptions
from slimstate.checkpoints.reader import Checkpoint
from slimstate.records.training import RECONSTRUCTION, RECOVERY, ReconstructionRecord
from slimstate.system.errors import OutputError, PlanError
from slimstate.training import distill, session

NAME = "delta_net-plain"
QUICK = {"steps": 2, "batch": 2, "samples": 8, "length": 32}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def distilled(source, out, text, rate, monkeypatch, **given):
    monkeypatch.setattr(distill, "LEARNING_RATE", rate)
    options = CutOptions(reconstruct=ReconstructOptions(**{**QUICK, "distill": 3, **given}))
    return slimstate.prune(source, out, key_dim=8, data=text, options=options, progress=False)


@pytest.fixture(scope="module")
def plain(folders, text_file, tmp_path_factory):
    """The reconstruction alone."""
    out = tmp_path_factory.mktemp("plain") / "out"
    options = CutOptions(reconstruct=ReconstructOptions(**QUICK))
    slimstate.prune(folders[NAME], out, key_dim=8, data=text_file, options=options, progress=False)
    return weights(out)


@pytest.mark.slow
def test_a_distillation_that_helps_changes_the_mixers_alone_and_is_recorded(
    folders, text_file, plain, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    record = distilled(folders[NAME], out, text_file, 1e-3, monkeypatch)
    found = record.reconstruction.distillation
    assert found.taken
    assert found.after < found.before
    assert ReconstructionRecord.read(out / RECONSTRUCTION).distillation == found
    assert json.loads((out / RECOVERY).read_text())["measured"]["nats"]["after"] == pytest.approx(found.after)
    within = tuple(f"{mixer.place_in_files}." for mixer in Checkpoint.open(out).mixers)
    after = weights(out)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, plain[name])}
    assert changed
    assert all(name.startswith(within) for name in changed)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_distillation_that_does_harm_is_not_taken(folders, text_file, plain, tmp_path, monkeypatch):
    told = iter((1.0, 1.5, 0.5))  # before, after, and the uncut model
    monkeypatch.setattr(session, "mean_nats", lambda *given: next(told))
    record = distilled(folders[NAME], tmp_path / "out", text_file, 1e-3, monkeypatch)
    assert not record.reconstruction.distillation.taken
    assert "not taken" in record.reconstruction.distillation.line()
    after = weights(tmp_path / "out")
    assert all(torch.equal(tensor, plain[name]) for name, tensor in after.items())
    assert not (tmp_path / "out" / RECOVERY).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_stopped_one_goes_on_with_what_was_reconstructed(folders, text_file, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as stopped:
        stopped.setattr(distill.Distilling, "_distil", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            distilled(folders[NAME], out, text_file, 1e-3, monkeypatch)
    assert not out.exists()
    kept = tmp_path / "out.distillation" / "reconstructed" / "out" / "config.json"
    made = kept.stat().st_mtime_ns
    with pytest.raises(PlanError, match="started with other settings"):
        distilled(folders[NAME], out, text_file, 1e-3, monkeypatch, distill=4)
    assert kept.stat().st_mtime_ns == made
    record = distilled(folders[NAME], out, text_file, 1e-3, monkeypatch)
    assert record.reconstruction.distillation.taken
    with pytest.raises(OutputError, match="exists already"):
        distilled(folders[NAME], out, text_file, 1e-3, monkeypatch)


@pytest.mark.slow
def test_a_cut_that_exists_is_reconstructed_and_distilled(folders, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "LEARNING_RATE", 1e-3)
    slimstate.prune(folders[NAME], tmp_path / "cut", key_dim=8, method="l1", progress=False)
    options = ReconstructOptions(**QUICK, distill=3)
    record = slimstate.reconstruct(tmp_path / "cut", tmp_path / "out", data=text_file, options=options, progress=False)
    assert record.distillation.taken
    assert record.command.endswith("--distill 3")
    assert f"--out {tmp_path / 'out'} " in record.command


@pytest.mark.slow
def test_killed_behind_its_last_step_or_behind_the_move_it_ends_at_once(folders, text_file, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def killed(*_):
        raise KeyboardInterrupt

    expected = distilled(folders[NAME], tmp_path / "whole", text_file, 1e-3, monkeypatch)
    with monkeypatch.context() as stopped:
        stopped.setattr(distill, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            distilled(folders[NAME], out, text_file, 1e-3, monkeypatch)
    assert not out.exists()
    with monkeypatch.context() as stopped:
        stopped.setattr(session.Session, "train", killed)  # nothing is left to train
        emptied = distill.DistillationFolder.empty
        stopped.setattr(distill.DistillationFolder, "empty", killed)
        with pytest.raises(KeyboardInterrupt):
            distilled(folders[NAME], out, text_file, 1e-3, monkeypatch)
        assert (tmp_path / "out.distillation").is_dir()
        stopped.setattr(distill.DistillationFolder, "empty", emptied)
        record = distilled(folders[NAME], out, text_file, 1e-3, monkeypatch)
    assert record.reconstruction.distillation == expected.reconstruction.distillation
    assert all(torch.equal(tensor, weights(out)[name]) for name, tensor in weights(tmp_path / "whole").items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.slow
def test_other_text_under_the_same_name_is_not_gone_on_with(folders, text_file, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(Path(text_file).read_text())
    with monkeypatch.context() as stopped:
        stopped.setattr(distill.Distilling, "_distil", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            distilled(folders[NAME], tmp_path / "out", text, 1e-3, monkeypatch)
    text.write_text(text.read_text()[::-1])
    with pytest.raises(PlanError, match="started with other settings: windows sha256:"):
        distilled(folders[NAME], tmp_path / "out", text, 1e-3, monkeypatch)


@pytest.mark.parametrize("wrong", [{"samples": 1}, {"samples": 8, "length": 100_000}])
def test_an_error_before_the_first_layer_leaves_nothing(wrong, folders, text_file, tmp_path, monkeypatch):
    with pytest.raises(slimstate.SlimstateError):
        distilled(folders[NAME], tmp_path / "out", text_file, 1e-3, monkeypatch, **wrong)
    monkeypatch.setattr("slimstate.reconstruction.walk.Walk.layers", lambda self: iter((1 / 0,)))
    with pytest.raises(ZeroDivisionError):
        distilled(folders[NAME], tmp_path / "out", text_file, 1e-3, monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_the_cut_itself_is_no_place_for_the_result(folders, text_file, tmp_path):
    cut = tmp_path / "cut"
    slimstate.prune(folders[NAME], cut, key_dim=8, method="l1", progress=False)
    options = ReconstructOptions(**QUICK, distill=1)
    for out in (cut, cut / "within"):
        with pytest.raises(OutputError, match="output folder overlaps the model folder"):
            slimstate.reconstruct(cut, out, data=text_file, options=options, force=True, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut"]
    assert not list(cut.glob("within*"))


@pytest.mark.slow
def test_any_name_will_do(folders, text_file, tmp_path, monkeypatch):
    for name in ("distilled", "reconstructed", "settings.json"):
        distilled(folders[NAME], tmp_path / name, text_file, 1e-3, monkeypatch)
    assert len(list(tmp_path.iterdir())) == 3
