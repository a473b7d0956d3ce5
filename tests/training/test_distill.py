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
from slimstate.records.reconstruction import RECONSTRUCTION, ReconstructionRecord
from slimstate.records.training import RECOVERY
from slimstate.system.errors import OutputError, PlanError
from slimstate.training import distill, session

NAME = "delta_net-plain"
QUICK = {"steps": 2, "batch": 2, "samples": 8, "length": 32}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def distilled(source, out, text, rate, monkeypatch, **given):
    monkeypatch.setattr(distill, "LEARNING_RATE", rate)
    options = CutOptions(reconstruct=ReconstructOptions(**{**QUICK, "distill": 3, **given}))
    return slimstate.prune(source, out, key_dim=8, calibration=text, options=options, progress=False)


@pytest.fixture(scope="module")
def plain(folders, text_file, tmp_path_factory):
    """The reconstruction alone."""
    out = tmp_path_factory.mktemp("plain") / "out"
    options = CutOptions(reconstruct=ReconstructOptions(**QUICK))
    slimstate.prune(folders[NAME], out, key_dim=8, calibration=text_file, options=options, progress=False)
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
    kept = tmp_path / "out.distillation" / "out" / "config.json"
    made = kept.stat().st_mtime_ns
    with pytest.raises(PlanError, match="begun with other settings"):
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
