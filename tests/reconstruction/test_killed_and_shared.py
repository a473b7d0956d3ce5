"""A reconstruction gives the same weights when it is killed and continued, and when several processes share it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

import slimstate
import tiny
from launching import PATIENCE, Program, launch, options

pytestmark = pytest.mark.slow

SETTINGS = {"steps": 6, "batch": 3, "samples": 10, "length": 32, "learning_rate": 3e-3, "device": "cpu"}


@pytest.fixture(scope="module")
def inputs(folders, text_file, tmp_path_factory) -> dict[str, Path]:
    model, cut = folders["gated_deltanet-plain"], tmp_path_factory.mktemp("cut") / "cut"
    slimstate.prune(model, cut, method="l1", key_dim=8)
    return {"model": cut, "teacher": model, "data": text_file}


@pytest.fixture(scope="module")
def expected(inputs, tmp_path_factory) -> Path:
    """What one process writes that is not interrupted."""
    out = tmp_path_factory.mktemp("expected") / "out"
    slimstate.reconstruct(**inputs, out=out, **SETTINGS)
    return out


def command(inputs: dict[str, Path], out: Path) -> list[object]:
    others = {name: value for name, value in inputs.items() if name != "model"}
    return ["-m", "slimstate", "reconstruct", inputs["model"], *options(**others, out=out, **SETTINGS)]


def test_a_killed_run_continues_to_the_same_bytes(inputs, expected, tmp_path):
    """It is killed at some moment after its first layer was finished."""
    out, folder = tmp_path / "out", tmp_path / "out.reconstruction"
    process, until = Program(*command(inputs, out)), time.monotonic() + PATIENCE
    while process.poll() is None and not list(folder.glob("layer-*.json")):
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(random.Random(3).uniform(0, 0.3))
    process.kill()
    assert not out.exists() or (out / "config.json").exists()
    if not out.exists():
        assert Program(*command(inputs, out)).wait() == 0
    for path in sorted(expected.glob("*.safetensors")):
        assert path.read_bytes() == (out / path.name).read_bytes()
    assert not folder.exists()


def test_two_processes_share_the_windows_and_reach_the_same_weights(inputs, expected, tmp_path):
    out = tmp_path / "out"
    ended = launch(2, tmp_path, *command(inputs, out))
    assert [code for code, _, _ in ended] == [0, 0], ended
    one, two = tiny.read_tensors(expected), tiny.read_tensors(out)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=2e-4), name
