"""However often a reconstruction is killed, and by how many processes it is made, it is the same."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import slimstate
from launching import PATIENCE, Program, launch, options
from slimstate import ReconstructOptions

pytestmark = pytest.mark.slow

NAME = "gated_deltanet-plain"
SETTINGS = {"steps": 6, "batch": 3, "samples": 10, "length": 32, "learning_rate": 3e-3, "device": "cpu"}


@pytest.fixture(scope="module")
def cut(folders, tmp_path_factory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("cut") / "cut"
    slimstate.prune(folders[NAME], out, method="l1", key_dim=8)
    return folders[NAME], out


def command(cut: tuple[Path, Path], text: Path, out: Path) -> list[str]:
    given = {"teacher": cut[0], "data": text, "out": out, **SETTINGS}
    return ["-m", "slimstate", "reconstruct", str(cut[1]), *options(**given)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def alone(cut, text_file, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "out"
    chosen = {name: value for name, value in SETTINGS.items() if name != "device"}
    slimstate.reconstruct(cut[1], out, data=text_file, teacher=cut[0], training=ReconstructOptions(**chosen))
    return out


def test_killed_it_goes_on_to_the_same_bytes(cut, alone, text_file, tmp_path):
    """It is killed a while after its first layer was done."""
    out, folder = tmp_path / "out", tmp_path / "out.reconstruction"
    process, until = Program(*command(cut, text_file, out)), time.monotonic() + PATIENCE
    while process.poll() is None and not list(folder.glob("layer-*.json")):
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(random.Random(3).uniform(0, 0.3))
    process.kill()
    assert not out.exists() or (out / "config.json").exists()
    if not out.exists():
        assert Program(*command(cut, text_file, out)).wait() == 0
    for path in sorted(alone.glob("*.safetensors")):
        assert path.read_bytes() == (out / path.name).read_bytes()
    assert not folder.exists()


def test_two_processes_share_the_windows_and_come_to_the_same_weights(cut, alone, text_file, tmp_path):
    out = tmp_path / "out"
    ended = launch(2, tmp_path, *command(cut, text_file, out))
    assert [code for code, _, _ in ended] == [0, 0], ended
    one, two = weights(alone), weights(out)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=2e-4), name
