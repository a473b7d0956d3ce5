"""The fuzzer tells bad ends from good ones, and draws the same damage from the same seed."""

import json
from dataclasses import replace
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import slimstate
import tiny
from forking import Ended
from fuzz.classes import CLASSES, Case
from fuzz.mutations import changed_bytes, changed_header, changed_json
from fuzz.verdicts import bad_end, difference, inventory, unexpected_change

FINE = Ended(code=2, processor=1, errors="kernels: none\nslimstate: no model at x\n")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"timed_out": True}, "hang"),
        ({"code": 1, "errors": "Traceback (most recent call last):\n  x\nKeyError: 1"}, "traceback: KeyError: 1"),
        ({"errors": "thread panicked at src/lib.rs"}, "panic"),
        ({"code": -11}, "exit code -11"),
        ({"processor": 11.0}, "slow"),
        ({"errors": "slimstate: " + "x" * 500}, "long line"),
        ({"errors": "slimstate: a\nslimstate: b"}, "not one line"),
        ({"errors": ""}, "not one line"),
    ],
)
def test_every_bad_end_is_recognized(changes, problem):
    assert bad_end(FINE) is None
    assert str(bad_end(replace(FINE, **changes))).startswith(problem)


def test_changes_outside_of_the_output_are_recognized(tmp_path):
    (tmp_path / "source").write_text("x")
    before = inventory(tmp_path)
    (tmp_path / "work" / "out").mkdir(parents=True)
    (tmp_path / "work" / "out" / "config.json").write_text("{}")
    case = Case(words=("prune", "model"), out="work/out")
    assert unexpected_change(before, inventory(tmp_path), case.outputs(True)) is None
    assert unexpected_change(before, inventory(tmp_path), case.outputs(False)) == "left: work"
    (tmp_path / "source").write_text("y")
    assert unexpected_change(before, inventory(tmp_path), case.outputs(True)) == "changed: source"
    (tmp_path / "source").unlink()
    assert unexpected_change(before, inventory(tmp_path), case.outputs(True)) == "gone: source"


@pytest.mark.slow
def test_a_written_model_is_compared_with_its_mask(folders, tmp_path):
    source, out = folders[tiny.PLAIN[1]], tmp_path / "cut"
    slimstate.prune(source, out, method="random", key_dim=8)
    assert difference(source, out) is None
    path = next(path for path in out.glob("*.safetensors") if any("k_proj" in name for name in load_file(path)))
    tensors = {name: tensor.flip(0) if "k_proj" in name else tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    assert "other than its mask" in str(difference(source, out))
    path.write_bytes(b"x" * 20)
    assert "unloadable" in str(difference(source, out))


def test_a_seed_always_draws_the_same_damage():
    data = json.dumps({"a": [1, 2, {"b": None}], "c": "d"}).encode()
    tensors = save({"x": torch.ones(3), "y": torch.ones(2)})
    for change, content in ((changed_json, data), (changed_bytes, data), (changed_header, tensors)):
        drawn = [change(Random(seed), content) for seed in range(60)]
        assert drawn == [change(Random(seed), content) for seed in range(60)]
        assert len(set(drawn)) > 20
    assert set(CLASSES) >= {"config", "header", "index", "plan", "evidence", "records", "text", "recipe", "tokenizer",
                            "weights", "arguments"}  # fmt: skip
