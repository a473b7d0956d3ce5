"""A distillation of the whole model after its reconstruction is used only where it helps on held-out windows."""

import json
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch

import slimstate
import tiny
from recoveries import weights_of
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.file_names import CONFIG
from slimstate.records.training import ReconstructionRecord, RecoveryRecord
from slimstate.reports.plots.style import label_of
from slimstate.system.errors import OutputError, PlanError
from slimstate.training import distill, session, tokens
from tiny import names

NAME = "delta_net-plain"
INTERRUPTED = Mock(side_effect=KeyboardInterrupt)
SHORT = {"steps": 2, "batch": 2, "samples": 8, "length": 32}
RECONSTRUCT = {"reconstruct": True, **{f"reconstruct_{name}": value for name, value in SHORT.items()}}


@pytest.fixture(scope="module")
def prune(folders, text_file):
    """Cut, reconstruct and distil, with a learning rate that helps in three steps."""

    def run(out, **changes):
        options = {"key_dim": 8, "data": text_file, "distill": 3, "progress": False, **RECONSTRUCT, **changes}
        return slimstate.prune(folders[NAME], out, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "LEARNING_RATE", 1e-3)
        yield run


@pytest.fixture(scope="module")
def distilled(prune, tmp_path_factory):
    """A result and its record; like all outputs here it has the name of a working file."""
    out = tmp_path_factory.mktemp("whole") / "distilled"
    record = prune(out)
    assert names(out.parent) == ["distilled"]
    return out, record


@contextmanager
def interruption(owner: object, name: str):
    """Expect the work in the block to reach this function, and interrupt it there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, INTERRUPTED)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.slow
@pytest.mark.parametrize("helps", [True, False])
def test_a_distillation_is_used_where_it_helps(helps, prune, distilled, tmp_path, monkeypatch):
    prune(tmp_path / "plain", distill=None)
    (out, record), plain = distilled, tiny.read_tensors(tmp_path / "plain")
    if not helps:
        nats = iter((1.0, 1.5, 0.5))  # before, after, and of the uncut model
        monkeypatch.setattr(tokens, "window_nats", lambda *_: [next(nats)] * 2)
        out = tmp_path / "distilled"
        record = prune(out)
        assert names(tmp_path) == ["distilled", "plain"]
    distillation = record.reconstruction.distillation
    assert distillation.taken == (distillation.after < distillation.before) == helps
    assert ("not taken" in distillation.line()) != helps
    assert ReconstructionRecord.read(out / ReconstructionRecord.FILE).distillation == distillation
    assert json.loads((out / CONFIG).read_text()).items() >= {"command": "prune", "distill": 3}.items()
    changed = {name for name, tensor in tiny.read_tensors(out).items() if not torch.equal(tensor, plain[name])}
    mixers = tuple(f"{mixer.place_in_files}." for mixer in Checkpoint.open(out).mixers)
    assert bool(changed) == (out / RecoveryRecord.FILE).exists() == helps
    if helps:
        assert RecoveryRecord.read(out / RecoveryRecord.FILE).model == str(out)
    slimstate.report(out, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "--apply" not in page  # which would repeat the bare cut
    assert "slimstate prune" in page
    assert all(name.startswith(mixers) for name in changed)
    card, command = (out / "README.md").read_text(), record.reconstruction.command
    headings = [line for line in card.splitlines() if line.startswith(("# ", "## "))]
    assert headings[0] == f"# {out.name}: key dim 8 instead of 24"
    assert headings[-2:] == ["## Reconstructed", "## Distilled"]
    assert "| key dim per head | 24 | 8 |" in card
    for layer in record.reconstruction.layers:
        assert f"| {layer.layer} | {layer.held_out_before:.4f} | {layer.held_out_after:.4f} |" in card
    assert ("| **this model** |" in card) == ("not taken" not in card) == helps
    assert f"{distillation.after:.4f}" in card
    assert "--distill 3" in command
    assert "--force" not in card
    if helps:
        nats = json.loads((out / RecoveryRecord.FILE).read_text())["measured"]["nats"]["after"]
        assert nats == pytest.approx(distillation.after)
        assert label_of(Checkpoint.open(out).identity("slim")) == "slim (drrqr, 8 of 24, reconstructed, distilled)"
        slimstate.prune(out, tmp_path / "again", key_dim=4, method="l1")
        assert "\nDistilled before on " in (tmp_path / "again" / "README.md").read_text()


@pytest.mark.slow
def test_an_interrupted_distillation_continues_with_the_reconstruction(prune, text_file, tmp_path, monkeypatch):
    """But not with other settings, nor with another text in the same place."""
    out, text = tmp_path / "reconstructed", tmp_path / "text.txt"
    text.write_text(text_file.read_text())
    with interruption(distill.DistillationJob, "_distil"):
        prune(out, data=text)
    assert not out.exists()
    file = tmp_path / "reconstructed.distillation" / "reconstructed" / "reconstructed" / "config.json"
    time = file.stat().st_mtime_ns
    with pytest.raises(PlanError, match="started with other settings"):
        prune(out, data=text, distill=4)
    text.write_text(text_file.read_text()[::-1])
    with pytest.raises(PlanError, match="started with other settings: windows sha256:"):
        prune(out, data=text)
    text.write_text(text_file.read_text())
    assert file.stat().st_mtime_ns == time
    monkeypatch.setattr("slimstate.reconstruction.reconstruct.ReconstructionJob.finish", INTERRUPTED)  # it is done
    assert prune(out, data=text).reconstruction.distillation.taken
    with pytest.raises(OutputError, match="exists already"):
        prune(out)


@pytest.mark.slow
def test_killed_after_its_last_step_or_after_the_move_it_ends_at_once(prune, distilled, tmp_path, monkeypatch):
    (whole, expected), out = distilled, tmp_path / "settings.json"
    with interruption(distill, "publish"):
        prune(out)
    assert not out.exists()
    monkeypatch.setattr(session.Session, "run_training", INTERRUPTED)  # nothing is left to train
    with interruption(distill.DistillationFolder, "empty"):
        prune(out)
    assert (tmp_path / "settings.json.distillation").is_dir()
    assert prune(out).reconstruction.distillation == expected.reconstruction.distillation
    assert weights_of(out) == weights_of(whole)
    assert names(tmp_path) == ["settings.json"]


@pytest.mark.parametrize("mistake", [{"reconstruct_samples": 1}, {"reconstruct_length": 100_000}, {"dtype": "float16"}])
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
