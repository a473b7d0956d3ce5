"""The config of a result is its provenance: `slimstate run RESULT` repeats the work and gives the same result."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

import slimstate
import tiny
from slimstate.cli.app import COMMANDS, find_command
from slimstate.cli.commands import WorkflowCommand
from slimstate.core.file_names import CONFIG
from slimstate.records.provenance import INPUTS, command_line
from slimstate.records.training import RECONSTRUCTION
from tiny_shapes import write_shape

NAME = "delta_net-plain"
STEPS = "--data TEXT --steps 2 --batch-size 2 --length 32 --report-to none"
LAYERS = "--data TEXT --steps 2 --batch 2 --samples 10 --length 32"
WINDOWS = "--data TEXT --samples 4 --length 64 --seed 3"
LAYERWISE = "--reconstruct --reconstruct-steps 2 --reconstruct-batch 2 --reconstruct-samples 10 --reconstruct-length 32"
FAST = [
    f"prune MODEL --key-dim 8 --score k --rrqr-f 2 {WINDOWS}",
    "prune MODEL --state-mb 0.01 --method l1 --keep-norm-eps",
]
SLOW = [
    f"prune MODEL --key-dim 8 --data TEXT {LAYERWISE} --distill 2",
    f"reconstruct CUT --teacher MODEL {LAYERS} --learning-rate 0.003",
    f"reconstruct CUT {LAYERS} --distill 2",
    f"recover CUT {STEPS} --preset paper --lora-rank 4",
    f"recover CUT {STEPS} --mixers --kd-weight 0.5",
    f"train SHAPE {STEPS} --shared-filters head --second-beta 0.9",
]
MEASUREMENTS = [
    "eval CUT --text TEXT --length 64 --max-tokens 512 --baseline MODEL",
    f"sweep MODEL --text TEXT --text-length 64 --max-tokens 512 --methods l1,drrqr --key-dims 12,8 {WINDOWS}",
    "analyze MODEL CUT --text TEXT --length 64 --skip 16 --every 16",
]
VOLATILE = ("seconds", "out", "config", "command", "recommended")


@pytest.fixture(scope="module")
def places(folders, text_file, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    slimstate.prune(folders[NAME], root / "cut", method="l1", key_dim=8)
    shape = write_shape(root / "shape.json", "delta_net")
    return {"MODEL": folders[NAME], "TEXT": text_file, "CUT": root / "cut", "SHAPE": shape}


@pytest.mark.parametrize("line", [*FAST, *(pytest.param(line, marks=pytest.mark.slow) for line in SLOW)])
def test_a_model_is_written_again_from_its_own_config(line, places, tmp_path, succeed, refusal):
    """The config does not name the folder of the result; read from there, it gives the same tensors and config."""
    first, second = tmp_path / "first", tmp_path / "second"
    succeed(*[places.get(word, word) for word in shlex.split(line)], "--out", first)
    if "--distill" in line:
        assert json.loads((first / RECONSTRUCTION).read_text())["distillation"] is not None
    assert "--out" in refusal("run", first), "nothing is overwritten"
    succeed("run", first, "--out", second)
    assert (first / CONFIG).read_text() == (second / CONFIG).read_text()
    one, two = tiny.read_tensors(first), tiny.read_tensors(second)
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
    assert succeed("run", first, "--dry-run").strip() == command_line(json.loads((first / CONFIG).read_text()))


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("line", MEASUREMENTS)
def test_a_measurement_is_repeated_from_its_own_record(line, places, tmp_path, succeed):
    def record_in(out: Path) -> Path:
        files = [out] if out.is_file() else sorted(out.glob("*.json"))
        return next(path for path in files if "config" in path.read_text())

    def numbers(path: Path) -> dict[str, object]:
        return {key: value for key, value in json.loads(path.read_text()).items() if key not in VOLATILE}

    suffix = ".json" if line.startswith("eval") else ""
    first, second = tmp_path / f"first{suffix}", tmp_path / f"second{suffix}"
    succeed(*[places.get(word, word) for word in shlex.split(line)], "--out", first)
    succeed("run", record_in(first), "--out", second)
    assert numbers(record_in(first)) == numbers(record_in(second))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_of_a_config_is_parsed_as_that_config(name):
    command = find_command(name)
    values = {name: ["x"] if name == "models" else "x" for name in command.inputs}
    assert command.argument in (None, *INPUTS)
    words = command_line({"command": command.name, **values}).split()[1 + len(command.name.split()) :]
    context = WorkflowCommand(command).make_context("x", list(words))
    assert {name: list(context.params[name]) if name == "models" else context.params[name] for name in values} == values
