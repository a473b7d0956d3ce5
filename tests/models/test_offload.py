"""A model that does not fit is calibrated all the same, to the same evidence; and a cut can be estimated unseen."""

import pytest
import torch

import slimstate
import tiny
from slimstate.models.load import load, load_spread
from slimstate.models.options import LoadOptions, parse_limits
from slimstate.system.errors import PlanError, SlimstateError

pytestmark = pytest.mark.slow
NAME = tiny.PLAIN[0]
SPREAD = {"device_map": "auto", "max_memory": "cpu=280KB"}


@pytest.mark.parametrize("name", ["delta_net-plain", "gated_deltanet-plain", "delta_net-tied"])
def test_layers_on_disk_compute_what_they_do_in_memory(name, tmp_path):
    folder = tiny.save(tiny.build(tiny.VARIANTS[name]), tmp_path / name, "100KB")
    whole, spread = load(folder), load_spread(folder, LoadOptions(**SPREAD))
    assert spread.offloaded > 0
    assert "on disk" in spread.kernels
    ids = torch.arange(64).view(2, 32)
    with torch.inference_mode():
        assert torch.equal(whole.model(input_ids=ids).logits, spread.model(input_ids=ids).logits)


def test_a_spread_calibration_cuts_the_same_channels(folders, text_file, tmp_path):
    settings = {"key_dim": 16, "data": str(text_file), "samples": 4, "length": 64}
    for name in tiny.PLAIN:
        slimstate.prune(folders[name], tmp_path / f"{name}-whole", **settings)
        record = slimstate.prune(folders[name], tmp_path / f"{name}-spread", **settings, **SPREAD)
        assert "on disk" in record.kernels
        for path in (tmp_path / f"{name}-whole").glob("*.safetensors"):
            assert path.read_bytes() == (tmp_path / f"{name}-spread" / path.name).read_bytes()


def test_where_everything_fits_nothing_is_offloaded(folders):
    assert load_spread(folders[NAME], LoadOptions(device_map="auto")).offloaded == 0


def test_gradients_of_a_spread_model_are_refused(folders, text_file, tmp_path):
    settings = {"method": "grad", "key_dim": 16, "data": str(text_file), "samples": 2, "length": 32}
    with pytest.raises(PlanError, match="gradients need all weights on the device"):
        slimstate.prune(folders[NAME], tmp_path / "cut", **settings, **SPREAD)
    assert not (tmp_path / "cut").exists()


def test_limits_are_read_by_place():
    assert parse_limits("0=40GiB, cpu=100GiB") == {"0": 40 * 2**30, "cpu": 100 * 2**30}
    assert parse_limits("cpu=1.5TB,1=7") == {"cpu": 1_500_000_000_000, "1": 7}
    assert parse_limits(None) is None


@pytest.mark.parametrize(("options", "complaint"), [
    (("--device-map", "balanced"), "unknown --device-map balanced"),
    (("--max-memory", "cpu=1GiB"), "--max-memory needs --device-map auto"),
    *((("--device-map", "auto", "--max-memory", size), "--max-memory must be sizes such as 0=40GiB,cpu=100GiB")
      for size in ("lots", "cpu=lots", "cpu=-5GiB", "cpu=inf")),
    (("--device-map", "auto", "--max-memory", "cpu=1KB"), "not even the embeddings fit"),
    (("--plan-only", "--apply", "plan.json"), "there is nothing to estimate"),
    (("--plan-only", "--reconstruct"), "--reconstruct is not part of an estimate"),
])  # fmt: skip
def test_bad_placements_are_one_line(options, complaint, folders, text_file, tmp_path, refusal):
    words = ("--key-dim", 16, "--data", text_file, "--samples", 2, "--length", 32) if "--apply" not in options else ()
    assert complaint in refusal("prune", folders[NAME], *words, "--out", tmp_path / "cut", *options)
    assert not (tmp_path / "cut").exists()


@pytest.fixture
def unloadable(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("slimstate.pruning.evidence.load_with", refuse)
    monkeypatch.setattr("slimstate.pruning.evidence.calibrate", refuse)


@pytest.mark.usefixtures("unloadable")
def test_an_estimate_loads_and_writes_nothing(folders, text_file, tmp_path):
    for method in ("l1", "s-wanda", "grad", "drrqr"):
        options = {"method": method, "key_dim": 16, "data": str(text_file), "length": 64}
        seconds = slimstate.estimate(folders[NAME], tmp_path / "cut", **options).seconds
        assert seconds["total"] == pytest.approx(sum(value for name, value in seconds.items() if name != "total"))
        assert ("calibration" in seconds) == (method != "l1")
    assert not (tmp_path / "cut").exists()


@pytest.mark.usefixtures("unloadable")
def test_an_estimate_refuses_what_the_cut_would_refuse(folders, text_file, tmp_path):
    folder = folders[NAME]
    (tmp_path / "there").write_text("a file")
    for words, given in {
        "needs activations": {"key_dim": 16},
        "`key_dim` must be at least 1": {"key_dim": 100, "method": "l1"},
        "samples of 4096 need": {"key_dim": 16, "data": str(text_file), "samples": 900, "length": 4096},
        "no data at": {"key_dim": 16, "data": "/nowhere/text.txt"},
    }.items():
        with pytest.raises(SlimstateError, match=words):
            slimstate.estimate(folder, **given)
    with pytest.raises(SlimstateError, match="there"):
        slimstate.estimate(folder, tmp_path / "there", key_dim=16, method="l1", progress=False)


@pytest.mark.usefixtures("unloadable")
def test_an_estimate_counts_weights_tokens_and_gradients(folders, text_file):
    folder, asked = folders[NAME], {"key_dim": 16, "data": str(text_file), "length": 64}
    plain = slimstate.estimate(folder, method="drrqr", samples=2, **asked)
    longer = slimstate.estimate(folder, method="drrqr", samples=8, **asked)
    gradients = slimstate.estimate(folder, method="grad", samples=2, **asked)
    assert (plain.tokens, longer.tokens) == (128, 512)
    assert plain.host_bytes == longer.host_bytes  # memory does not grow with tokens
    assert gradients.host_bytes["a pass"] > 2 * plain.host_bytes["a pass"]
    parameters = sum(weight.numel() for weight in load(folder).model.state_dict().values())
    assert plain.host_bytes["weights"] == 4 * parameters
