"""Cut layers that are trained to give what the uncut ones gave."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import slimstate
import tiny
from command import run
from launching import stock_logits
from slimstate import Calibration, CutOptions, ReconstructOptions
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.file_names import PLAN
from slimstate.families import FAMILIES as FAMILIES_BY_TYPE
from slimstate.reconstruction import fit, walk
from slimstate.reconstruction.trained_layers import TrainedLayers
from slimstate.records.plan import Plan
from slimstate.records.reconstruction import RECONSTRUCTION, ReconstructionRecord
from slimstate.system.errors import SlimstateError

# of those whose language model is another's, that one
FAMILIES = tuple(name for name in tiny.EVERY_PLAIN if FAMILIES_BY_TYPE[tiny.VARIANTS[name].model_type].language is None)
QUICK = ReconstructOptions(steps=4, batch=2, samples=6, length=32, learning_rate=3e-3)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.fixture(scope="module")
def rebuilt(folders, text_file, tmp_path_factory):
    """Every family cut at random and reconstructed; then run by the stock class in fresh processes."""
    root = tmp_path_factory.mktemp("rebuilt")
    made = {}
    for name in FAMILIES:
        cut, out = root / f"{name}-cut", root / f"{name}-rebuilt"
        slimstate.prune(folders[name], cut, method="random", key_dim=8)
        record = slimstate.reconstruct(cut, out, data=text_file, options=QUICK)
        made[name] = cut, out, record
    torch.save(tiny.token_ids(), root / "ids.pt")
    for kind, names in (((), tiny.OF_FLA), (("--without-fla",), tiny.OF_TRANSFORMERS)):
        outs = [out for name, (_, out, _) in made.items() if name in names]
        stock_logits(root / "ids.pt", outs, *kind)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_error_of_every_layer_falls_and_the_stock_class_loads_the_result(name, rebuilt):
    _, out, record = rebuilt[name]
    assert [layer.layer for layer in record.layers] == [mixer.layer for mixer in Checkpoint.open(out).mixers]
    for layer in record.layers:
        assert layer.step > 0
        assert layer.held_out_after < layer.held_out_before
    assert list(out.glob("logits*.pt"))
    assert ReconstructionRecord.read(out / RECONSTRUCTION) == record


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_that_are_not_the_mixers_or_its_norms_are_the_same_bytes(name, rebuilt):
    cut, out, _ = rebuilt[name]
    before, after = tensors_of(cut), tensors_of(out)
    assert before.keys() == after.keys()
    mixers = Checkpoint.open(cut).mixers
    places = tuple(f"{mixer.place_in_files}." for mixer in mixers)
    changed = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert any(key.startswith(places) for key in changed)
    norms = {key for key in changed if not key.startswith(places)}
    assert all("norm" in key for key in norms)
    assert len(norms) <= len(mixers) * 2  # a weight and a bias
    for key in after:
        assert after[key].dtype == before[key].dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delta_net-plain", "qwen3_next-plain"])
def test_choosing_cutting_and_reconstructing_in_one_walk(name, folders, text_file, tmp_path):
    record = slimstate.prune(
        folders[name], tmp_path / "out", key_dim=8, calibration=Calibration(data=str(text_file)),
        reconstruct=QUICK,
    )  # fmt: skip
    assert record.reconstruction is not None
    assert record.reconstruction.error_after < record.reconstruction.error_before
    plan = Plan.read(tmp_path / "out" / PLAN)
    assert plan.key_dim == 8
    assert plan.method == "drrqr"
    assert "rho" in plan.summary()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["slimstate"]["reconstructed"][0]["settings"]["steps"] == 4
    assert not list(tmp_path.glob("*.reconstruction"))
    assert "## Reconstructed" in (tmp_path / "out" / "README.md").read_text()


def test_a_dry_run_chooses_from_the_calibration_and_trains_nothing(folders, text_file):
    calibration = Calibration(data=str(text_file), samples=4, length=32)
    record = slimstate.prune(folders["delta_net-plain"], None, key_dim=8, calibration=calibration, reconstruct=QUICK)
    assert record.out is None
    assert record.reconstruction is None


def test_what_training_does_not_improve_keeps_the_weights_of_the_cut(folders, text_file, tmp_path, monkeypatch):
    """With no step at all, and with steps up the gradient."""
    monkeypatch.setattr(fit, "_rate", lambda number, steps: -1.0)
    cut = tmp_path / "cut"
    slimstate.prune(folders["delta_net-plain"], cut, method="l1", key_dim=8)
    for number, options in enumerate((ReconstructOptions(steps=0, samples=6, length=32), QUICK)):
        record = slimstate.reconstruct(cut, tmp_path / f"out{number}", data=text_file, options=options)
        assert all(layer.step == 0 for layer in record.layers)
        for key, tensor in tensors_of(tmp_path / f"out{number}").items():
            assert torch.equal(tensor, tensors_of(cut)[key])


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_at_its_layer_with_the_same_bytes(folders, text_file, tmp_path, monkeypatch):
    model = folders["gated_deltanet-plain"]
    whole = {"calibration": Calibration(data=str(text_file)), "key_dim": 8, "reconstruct": QUICK}
    slimstate.prune(model, tmp_path / "whole", **whole)

    fitted = []

    def stopping(task, settings, layer, step):
        if layer == 1 and not fitted:
            fitted.append(layer)
            raise KeyboardInterrupt
        return original(task, settings, layer, step)

    original = walk.fit
    monkeypatch.setattr(walk, "fit", stopping)
    with pytest.raises(KeyboardInterrupt):
        slimstate.prune(model, tmp_path / "stopped", **whole)
    assert not (tmp_path / "stopped").exists()
    with pytest.raises(SlimstateError, match="other settings"):
        slimstate.prune(model, tmp_path / "stopped", **{**whole, "key_dim": 4})
    slimstate.prune(model, tmp_path / "stopped", **whole)
    for path in sorted((tmp_path / "whole").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "stopped" / path.name).read_bytes()
    assert (tmp_path / "whole" / PLAN).read_text() == (tmp_path / "stopped" / PLAN).read_text()


@pytest.mark.slow
def test_hidden_states_on_disk_give_the_same_bytes(folders, text_file, tmp_path):
    cut = tmp_path / "cut"
    slimstate.prune(folders["delta_net-plain"], cut, method="l1", key_dim=8)
    for place, where in (("host", {}), ("disk", {"device_map": "auto", "max_memory": "cpu=1KB"})):
        slimstate.reconstruct(cut, tmp_path / place, data=text_file, options=QUICK, run=slimstate.LoadOptions(**where))
    for path in sorted((tmp_path / "host").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "disk" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"teacher": "other"}, "was not cut from"),
        ({"teacher": "nowhere"}, "no model at"),
        ({"model": "uncut"}, "was not cut: there is nothing to reconstruct"),
        ({"data": "short"}, "10 samples of 32 need 320"),
    ],
)
def test_bad_input_is_one_line(change, words, folders, text_file, tmp_path):
    cut, short = tmp_path / "cut", tmp_path / "short.txt"
    slimstate.prune(folders["delta_net-plain"], cut, method="l1", key_dim=8)
    short.write_text("a few words")
    places = {
        "other": folders["delta_net-gate"],
        "nowhere": tmp_path / "nowhere",
        "uncut": folders["delta_net-plain"],
        "short": short,
    }
    given = {"model": cut, "data": text_file, "teacher": folders["delta_net-plain"]}
    given |= {key: places[value] for key, value in change.items()}
    with pytest.raises(SlimstateError, match=words):
        slimstate.reconstruct(
            given["model"], tmp_path / "out", data=given["data"], teacher=given["teacher"],
            training=ReconstructOptions(steps=1, length=32),
        )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "short.txt"]


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--reconstruct-samples", 1, "one window is held out, and at least one more is needed"),
        ("--reconstruct-steps", -1, "at least 0 is needed"),
        ("--reconstruct-length", 1, "windows of at least 2 tokens are needed"),
        ("--reconstruct-learning-rate", 2.0, "it must lie between 0 and 1"),
    ],
)
@pytest.mark.parametrize("verb", [("prune", "--out", "out"), ("sweep", "--out", "out", "--text", "nothing.txt")])
def test_a_verb_that_reconstructs_names_its_own_flags(
    verb, flag, value, words, folders, text_file, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    model = (folders["delta_net-plain"], "--data", text_file)
    code, _, err = run(capsys, monkeypatch, *verb, *model, "--reconstruct", flag, value)
    assert code == 2
    assert err.splitlines()[-1] == f"slimstate: {flag} {value}: {words}"


@pytest.mark.parametrize("distilled", [(), ("--distill", 2)])
def test_too_little_text_for_a_reconstruction_names_its_own_flags(
    distilled, folders, text_file, tmp_path, capsys, monkeypatch
):
    model = ("prune", folders["delta_net-plain"], "--method", "l1", "--key-dim", 8, "--out", tmp_path / "out")
    cures = ((10**6, None, "give a shorter --reconstruct-length"), (32, 10**6, "use --reconstruct-samples "))
    for length, samples, cure in cures:
        asked = () if samples is None else ("--reconstruct-samples", samples)
        text = ("--data", text_file, "--reconstruct", "--reconstruct-length", length, *asked, *distilled)
        code, _, err = run(capsys, monkeypatch, *model, *text)
        assert code == 2
        assert cure in err.splitlines()[-1]
        assert " --length" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "delta_net-plain",
            {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1},
            "the tokenizer gives token .*, and the model has embeddings of 60",
        ),
        ("delta_net-residuals", {}, "hand on more than hidden states, such as attention residuals"),
    ],
)
def test_models_that_cannot_be_reconstructed_are_refused(name, changes, words, text_file, tmp_path):
    model, cut, out = tmp_path / "model", tmp_path / "cut", tmp_path / "out"
    tiny.save(tiny.build(tiny.VARIANTS[name], **changes), model)
    slimstate.prune(model, cut, method="l1", key_dim=8)
    with pytest.raises(SlimstateError, match=words):
        slimstate.reconstruct(cut, out, data=text_file, options=QUICK)
    with pytest.raises(SlimstateError, match=words):
        slimstate.prune(
            model, out, key_dim=8, calibration=Calibration(data=str(text_file), samples=2, length=32),
            reconstruct=QUICK,
        )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "model"]


def damage(folder: Path, name: str, value: float) -> None:
    """One tensor of a checkpoint, there before or not, holds this value alone."""
    tensors = tensors_of(folder)
    tensors[name] = torch.full_like(tensors.get(name, torch.ones(4)), value)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


SPARE, UNKNOWN = "model.layers.1.attn.spare.weight", "does not load 1 of its tensors, such as model.layers.1.attn.spare"


@pytest.mark.parametrize(
    ("name", "value", "words", "kept"),
    [
        ("model.layers.1.mlp.down_proj.weight", float("nan"), "layer 1 of .*model gives NaN or infinite numbers", [0]),
        (SPARE, 0.0, UNKNOWN, []),
    ],
)
def test_a_damaged_model_is_refused_before_the_layer_is_trained(name, value, words, kept, folders, text_file, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(folders["delta_net-plain"], model)
    damage(model, name, value)
    with pytest.raises(SlimstateError, match=words):
        slimstate.prune(
            model, out, key_dim=8, calibration=Calibration(data=str(text_file), samples=2, length=32),
            reconstruct=QUICK,
        )  # fmt: skip
    assert not out.exists()
    found = TrainedLayers.beside(out).path.glob("layer-*.json")
    assert sorted(int(path.stem.partition("-")[2]) for path in found) == kept


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers.1.attn.o_proj.weight", float("nan"), "layer 1 of the cut model gives NaN or infinite numbers"),
        (SPARE, 0.0, UNKNOWN),
    ],
)
def test_a_damaged_cut_is_refused_at_its_layer(name, value, words, folders, text_file, tmp_path):
    cut, out = tmp_path / "cut", tmp_path / "out"
    slimstate.prune(folders["delta_net-plain"], cut, method="l1", key_dim=8)
    damage(cut, name, value)
    with pytest.raises(SlimstateError, match=words):
        slimstate.reconstruct(cut, out, data=text_file, options=QUICK)
    assert not out.exists()


def test_hidden_states_take_their_room_on_the_disk_at_once(folders, text_file, tmp_path, monkeypatch):
    """A mapped file without room behind it would end the process."""
    cut, run = tmp_path / "cut", slimstate.LoadOptions(device_map="auto", max_memory="cpu=1KB")
    slimstate.prune(folders["delta_net-plain"], cut, method="l1", key_dim=8)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(SlimstateError, match=r"no space left for .*out\.reconstruction"):
        slimstate.reconstruct(cut, tmp_path / "out", data=text_file, options=QUICK, run=run)
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


@pytest.mark.parametrize(
    ("place", "words", "left"),
    [
        ("slimstate.reconstruction.trained_layers.save_file", "no space left for .*; nothing of it was written", []),
        (
            "slimstate.checkpoints.safetensors_io.Rewriting.put",
            "no space left.*; 2 layers are kept in .*out.reconstruction; the same command continues there",
            ["out.reconstruction"],
        ),
    ],
    ids=["at the first layer", "at the end"],
)
@pytest.mark.parametrize("chosen_on_the_way", [False, True])
def test_a_disk_that_fills_up_is_one_line_and_what_is_done_is_kept(
    chosen_on_the_way, place, words, left, folders, text_file, tmp_path, monkeypatch
):
    model, cut, out = folders["delta_net-plain"], tmp_path / "cut", tmp_path / "out"
    slimstate.prune(model, cut, method="l1", key_dim=8)

    def work():
        if chosen_on_the_way:
            reconstructing = CutOptions(reconstruct=QUICK)
            slimstate.prune(model, out, key_dim=8, calibration=Calibration(data=str(text_file)), options=reconstructing)
        else:
            slimstate.reconstruct(cut, out, data=text_file, options=QUICK)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(place, full)
        with pytest.raises(SlimstateError, match=words) as told:
            work()
    assert "\n" not in str(told.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", *left]
    work()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "out"]
