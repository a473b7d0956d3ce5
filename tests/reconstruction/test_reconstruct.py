"""Cut layers are trained to match the output of the uncut layers."""

import errno
import json
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from fla.layers.delta_net import DeltaNet
from safetensors.torch import save_file

import slimstate
import tiny
from launching import PATIENCE, Program, launch, stock_logits
from launching import options as flags
from slimstate import ReconstructOptions
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.file_names import PLAN
from slimstate.reconstruction import fit, rates, reconstruct
from slimstate.reconstruction.trained_layers import TrainedLayers
from slimstate.records.plan import Plan
from slimstate.records.training import ReconstructionRecord
from slimstate.system.errors import SlimstateError
from tiny import names

pytestmark = pytest.mark.slow
QUICK = ReconstructOptions(steps=4, batch=2, samples=6, length=32, learning_rate=3e-3)
QUICKEST = ReconstructOptions(steps=2, batch=2, samples=4, length=32, learning_rate=3e-3)
SHORT = {"samples": 2, "length": 32}  # calibration
SMALL_VOCABULARY = {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
SPARE, MLP, MIXER = (f"model.layers.1.{part}.weight" for part in ("attn.spare", "mlp.down_proj", "attn.o_proj"))
UNKNOWN = "does not load 1 of its tensors, such as model.layers.1.attn.spare"
COPY = "slimstate.checkpoints.safetensors_io.TensorFileWriter.copy"  # beside the training of the first layer
KEPT = "no space left.*; 2 layers are kept in .*out.reconstruction; the same command continues there"
UNFIT = [
    ({"teacher": "other"}, "was not cut from"),
    ({"teacher": "nowhere"}, "no model at"),
    ({"model": "uncut"}, "was not cut: there is nothing to reconstruct"),
    ({"data": "short.txt"}, "10 samples of 32 need 320"),
    ({"data": None}, "give it with `data`"),
]
REFUSED = [
    ("delta_net-plain", SMALL_VOCABULARY, "the text has token .*, and the model embeddings of 60"),
    ("delta_net-residuals", {}, "pass on more than hidden states, such as attention residuals"),
]
DAMAGED = [
    ("model", MLP, float("nan"), "layer 1 of .*model gives NaN or infinite numbers", [0]),
    ("model", SPARE, 0.0, f"has a tensor {SPARE}, which its config has no place for", []),
    ("cut", MIXER, float("nan"), "layer 1 of the cut model gives NaN or infinite numbers", [0]),
    ("cut", SPARE, 0.0, UNKNOWN, []),
]
FULL_DISKS = [
    (False, "os.posix_fallocate", r"no space left for .*out\.reconstruction", []),  # for the hidden states
    (False, "slimstate.reconstruction.trained_layers.save_file", "no space left for .*; nothing of it was", []),
    (True, "slimstate.reconstruction.trained_layers.save_file", "no space left for .*; nothing of it was", []),
    (False, "slimstate.checkpoints.safetensors_io.TensorFileWriter.put", KEPT, ["out.reconstruction"]),
    (True, "slimstate.checkpoints.safetensors_io.TensorFileWriter.put", KEPT, ["out.reconstruction"]),
    (True, COPY, "no space left.*; 1 layer is kept in", ["out.reconstruction"]),
]


@pytest.fixture
def cut(folders, tmp_path) -> Path:
    out = tmp_path / "cut"
    slimstate.prune(folders["delta_net-plain"], out, method="l1", key_dim=8)
    return out


def assert_same_weights(one: Path, other: Path) -> None:
    for path in sorted(one.glob("*.safetensors")):
        assert path.read_bytes() == (other / path.name).read_bytes()


@pytest.fixture(scope="module")
def rebuilt(folders, text_file, tmp_path_factory) -> dict[str, tuple[Path, Path, ReconstructionRecord]]:
    """Every family cut at random and reconstructed, then run by the stock class in fresh processes."""
    root = tmp_path_factory.mktemp("rebuilt")
    results = {}
    for name in tiny.DISTINCT:
        cut, out = root / f"{name}-cut", root / f"{name}-rebuilt"
        size = {"value_dim" if name in tiny.VALUES_ONLY else "key_dim": 8}
        slimstate.prune(folders[name], cut, method="random", **size)
        results[name] = cut, out, slimstate.reconstruct(cut, out, data=text_file, training=QUICKEST)
    torch.save(tiny.token_ids(), root / "ids.pt")
    for kind, library in (((), tiny.OF_FLA), (("--without-fla",), tiny.OF_TRANSFORMERS)):
        stock_logits(root / "ids.pt", [out for name, (_, out, _) in results.items() if name in library], *kind)
    return results


@pytest.mark.parametrize("name", tiny.DISTINCT)
def test_every_layer_improves_only_mixers_and_norms_change_and_the_stock_class_loads_it(name, rebuilt):
    cut, out, record = rebuilt[name]
    mixers = Checkpoint.open(cut).mixers
    assert [layer.layer for layer in record.layers] == [mixer.layer for mixer in mixers]
    for layer in record.layers:
        assert layer.step > 0 or layer.refit
        assert layer.held_out_after < layer.held_out_before
    assert list(out.glob("logits*.pt"))
    assert ReconstructionRecord.read(out / ReconstructionRecord.FILE) == record
    before, after = tiny.read_tensors(cut), tiny.read_tensors(out)
    assert {key: tensor.dtype for key, tensor in before.items()} == {key: tensor.dtype for key, tensor in after.items()}
    prefixes = tuple(f"{mixer.place_in_files}." for mixer in mixers)
    changed = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert any(key.startswith(prefixes) for key in changed)
    norms = {key for key in changed if not key.startswith(prefixes)}
    assert all("norm" in key for key in norms)
    assert len(norms) <= len(mixers) * 2  # a weight and a bias


@pytest.mark.parametrize("name", ["delta_net-plain", "qwen3_next-plain"])
def test_channels_are_chosen_cut_and_reconstructed_in_one_walk(name, folders, text_file, tmp_path):
    out = tmp_path / "out"
    record = slimstate.prune(folders[name], out, key_dim=8, data=text_file, reconstruct=QUICK)
    assert record.reconstruction is not None
    assert record.reconstruction.error_after < record.reconstruction.error_before
    plan = Plan.read(out / PLAN)
    assert (plan.key_dim, plan.method) == (8, "drrqr")
    assert "rho" in plan.summary()
    config = json.loads((out / "config.json").read_text())
    assert config["slimstate"]["reconstructed"][0]["settings"]["steps"] == 4
    assert not list(tmp_path.glob("*.reconstruction"))
    assert "## Reconstructed" in (out / "README.md").read_text()


@pytest.mark.parametrize(("stored", "computed"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_a_model_in_the_other_half_precision_is_reconstructed(stored, computed, text_file, tmp_path):
    model = tiny.build(tiny.VARIANTS["gated_deltanet-plain"]).to(getattr(torch, stored))
    tiny.save(model, tmp_path / "model")
    out, options = tmp_path / "out", {"key_dim": 8, "data": text_file, "reconstruct": QUICKEST, "dtype": computed}
    slimstate.prune(tmp_path / "model", out, **options)
    assert {tensor.dtype for tensor in tiny.read_tensors(out).values()} == {getattr(torch, stored)}


def test_out_of_memory_while_a_layer_is_calibrated_halves_the_pieces(folders, text_file, tmp_path, monkeypatch):
    forward, sizes = DeltaNet.forward, []

    def forward_little(layer, hidden_states, *args, **kwargs):
        sizes.append(len(hidden_states))
        if sizes[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(layer, hidden_states, *args, **kwargs)

    options = {"key_dim": 8, "data": text_file, "reconstruct": QUICK, "keep_heads": True}
    slimstate.prune(folders["delta_net-plain"], tmp_path / "plain", **options)
    monkeypatch.setattr(DeltaNet, "forward", forward_little)
    slimstate.prune(folders["delta_net-plain"], tmp_path / "halved", **options)
    assert max(sizes) > 3
    plain, halved = (Plan.read(tmp_path / name / PLAN).selections for name in ("plain", "halved"))
    assert all(torch.equal(plain[layer].keep, halved[layer].keep) for layer in plain)


def test_layers_that_do_not_improve_keep_the_weights_of_the_cut(cut, text_file, tmp_path, monkeypatch):
    """Without any step, and with steps up the gradient."""
    monkeypatch.setattr(fit, "_rate", lambda number, steps: -1.0)
    for number, options in enumerate((ReconstructOptions(steps=0, samples=6, length=32), QUICK)):
        record = slimstate.reconstruct(cut, tmp_path / f"out{number}", data=text_file, training=options)
        assert all(layer.step == 0 for layer in record.layers)
        for key, tensor in tiny.read_tensors(tmp_path / f"out{number}").items():
            assert torch.equal(tensor, tiny.read_tensors(cut)[key])


def test_an_interrupted_run_continues_at_its_layer_to_the_same_bytes(folders, text_file, tmp_path, monkeypatch):
    model, out = folders["gated_deltanet-plain"], tmp_path / "stopped"
    options = {"data": text_file, "key_dim": 8, "reconstruct": replace(QUICK, learning_rate=None)}
    slimstate.prune(model, tmp_path / "whole", **options)
    monkeypatch.setattr(reconstruct, "COPYING_DEVICES", ("cpu",))  # beside the training, as on a GPU
    interruptions, original = [KeyboardInterrupt], rates.fit

    def interrupted_fit(task, settings, layer, rate, step):
        if layer == 1 and interruptions:
            raise interruptions.pop()
        return original(task, settings, layer, rate, step)

    monkeypatch.setattr(rates, "fit", interrupted_fit)
    with pytest.raises(KeyboardInterrupt):
        slimstate.prune(model, out, **options)
    assert names(tmp_path) == ["stopped.reconstruction", "whole"]
    with pytest.raises(SlimstateError, match="other settings"):
        slimstate.prune(model, out, **{**options, "key_dim": 4})
    slimstate.prune(model, out, **options)
    assert_same_weights(tmp_path / "whole", out)
    assert (tmp_path / "whole" / PLAN).read_text() == (out / PLAN).read_text()
    paths = (folder / ReconstructionRecord.FILE for folder in (tmp_path / "whole", out))
    one, other = (ReconstructionRecord.read(path).layers for path in paths)
    assert [replace(layer, seconds=None) for layer in one] == [replace(layer, seconds=None) for layer in other]
    assert len(one[0].trial) == 3
    assert {layer.chosen_rate for layer in one} == {other[0].chosen_rate}
    assert f"other layers of its kind start with {other[0].chosen_rate:g}" in (out / "README.md").read_text()


@pytest.fixture(scope="module")
def reconstruction(folders, text_file, tmp_path_factory) -> tuple[list[object], Path]:
    """Return a command up to its output folder, and the result of one process that is not interrupted."""
    root, model = tmp_path_factory.mktemp("reconstruction"), folders["gated_deltanet-plain"]
    options = {"teacher": model, "data": text_file, "steps": 6, "batch": 3, "samples": 10, "length": 32}
    slimstate.prune(model, root / "cut", method="l1", key_dim=8)
    slimstate.reconstruct(root / "cut", root / "out", **options, device="cpu")
    words = flags(**options, device="cpu")
    return ["-m", "slimstate", "reconstruct", root / "cut", *words, "--out"], root / "out"


def test_a_killed_run_continues_to_the_same_bytes(reconstruction, tmp_path):
    """It is killed at some moment after its first layer was finished."""
    (command, expected), out, folder = reconstruction, tmp_path / "out", tmp_path / "out.reconstruction"
    process, until = Program(*command, out), time.monotonic() + PATIENCE
    while process.poll() is None and not list(folder.glob("layer-*.json")):
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(random.Random(3).uniform(0, 0.3))
    process.kill()
    assert not out.exists() or (out / "config.json").exists()
    if not out.exists():
        assert Program(*command, out).wait() == 0
    assert_same_weights(expected, out)
    assert not folder.exists()


def test_two_processes_share_the_windows_and_reach_the_same_weights(reconstruction, tmp_path):
    command, expected = reconstruction
    ended = launch(2, tmp_path, *command, tmp_path / "out")
    assert [code for code, _, _ in ended] == [0, 0], ended
    one, two = tiny.read_tensors(expected), tiny.read_tensors(tmp_path / "out")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=2e-4), name


def test_hidden_states_on_disk_give_the_same_bytes(rebuilt, text_file, tmp_path):
    cut, expected, _ = rebuilt["delta_net-plain"]
    slimstate.reconstruct(cut, tmp_path / "disk", data=text_file, training=QUICKEST, max_memory="cpu=1KB")
    assert_same_weights(expected, tmp_path / "disk")


@pytest.mark.parametrize(("change", "message"), UNFIT)
def test_inputs_that_do_not_fit_are_refused(change, message, cut, folders, text_file, tmp_path):
    (tmp_path / "short.txt").write_text("a few words")
    places = {"other": folders["delta_net-gate"], "uncut": folders["delta_net-plain"], None: None}
    inputs = {"model": cut, "data": text_file, "teacher": folders["delta_net-plain"]}
    inputs |= {key: places.get(value, tmp_path / str(value)) for key, value in change.items()}
    with pytest.raises(SlimstateError, match=message):
        slimstate.reconstruct(inputs.pop("model"), tmp_path / "out", **inputs, steps=1, length=32)
    assert names(tmp_path) == ["cut", "short.txt"]


@pytest.mark.parametrize("command", [("prune", "--key-dim", 8), ("sweep", "--text", "nothing.txt")])
def test_commands_that_reconstruct_name_their_own_flags(command, refusal, folders, text_file, tmp_path):
    words = (*command, folders["delta_net-plain"], "--out", tmp_path / "out", "--data", text_file, "--reconstruct")
    limits = {"samples": (1, "at least 2"), "steps": (-1, "at least 0"), "length": (1, "at least 2")}
    limits["learning-rate"] = (2, "less than 1")
    for name, (value, limit) in limits.items():
        line = refusal(*words, f"--reconstruct-{name}", value)
        assert line == f"--reconstruct-{name} must be {limit}, got {value}"
    for distillation in ((), ("--distill", 2)) if command[0] == "prune" else ():
        short = (*words, "--method", "l1", *distillation, "--reconstruct-length")
        assert "a shorter --reconstruct-length" in refusal(*short, 10**6)
        assert "use --reconstruct-samples " in refusal(*short, 32, "--reconstruct-samples", 10**6)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_models_that_cannot_be_reconstructed_are_refused(name, changes, message, text_file, tmp_path):
    model, cut, out = tmp_path / "model", tmp_path / "cut", tmp_path / "out"
    tiny.save(tiny.build(tiny.VARIANTS[name], **changes), model)
    slimstate.prune(model, cut, method="l1", key_dim=8)
    with pytest.raises(SlimstateError, match=message):
        slimstate.reconstruct(cut, out, data=text_file, training=QUICK)
    with pytest.raises(SlimstateError, match=message):
        slimstate.prune(model, out, key_dim=8, data=text_file, reconstruct=QUICK)
    assert names(tmp_path) == ["cut", "model"]


@pytest.mark.parametrize(("which", "name", "value", "message", "trained"), DAMAGED)
def test_a_damaged_model_or_cut_is_refused_before_the_layer_is_trained(
    which, name, value, message, trained, cut, folders, text_file, tmp_path
):
    """The damage: one tensor, known to the model or not, holds this value alone."""
    model, out = shutil.copytree(folders["delta_net-plain"], tmp_path / "model"), tmp_path / "out"
    damaged = tmp_path / which
    tensors = tiny.read_tensors(damaged)
    tensors[name] = torch.full_like(tensors.get(name, torch.ones(4)), value)
    for file in damaged.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SlimstateError, match=message):
        work(None if which == "model" else cut, model, out, text_file)
    assert not out.exists()
    finished = TrainedLayers.beside(out).path.glob("layer-*.json")
    assert sorted(int(path.stem.partition("-")[2]) for path in finished) == trained


def work(cut: Path | None, model: Path, out: Path, text_file: Path) -> None:
    """Reconstruct a cut, or cut and reconstruct a model in one walk."""
    if cut is not None:
        slimstate.reconstruct(cut, out, data=text_file, training=QUICK, max_memory="cpu=1KB")
    else:
        slimstate.prune(model, out, key_dim=8, data=text_file, reconstruct=QUICK)


@pytest.mark.parametrize(("layerwise", "place", "message", "left"), FULL_DISKS)
def test_a_full_disk_is_one_line_and_finished_layers_are_kept(
    layerwise, place, message, left, cut, folders, text_file, tmp_path, monkeypatch
):
    """Hidden states reserve their space at once: a mapped file without space behind it would end the process."""
    places = None if layerwise else cut, folders["delta_net-plain"], tmp_path / "out", text_file
    monkeypatch.setattr(reconstruct, "COPYING_DEVICES", ("cpu",))
    with monkeypatch.context() as patch:
        patch.setattr(place, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(SlimstateError, match=message) as error:
            work(*places)
    assert "\n" not in str(error.value)
    assert names(tmp_path) == ["cut", *left]
    work(*places)
    assert names(tmp_path) == ["cut", "out"]
