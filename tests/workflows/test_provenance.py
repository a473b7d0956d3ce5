"""The config of a result is its provenance: `slimstate run RESULT` repeats the work and gives the same result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import slimstate
import tiny
from command import run
from slimstate.cli.app import COMMANDS, find_command
from slimstate.cli.commands import WorkflowCommand
from slimstate.core.file_names import CONFIG
from slimstate.records.provenance import INPUTS, command_line
from slimstate.records.training import RECONSTRUCTION
from tiny_shapes import write_shape

NAME = "delta_net-plain"
STEPS = ("--steps", 2, "--batch-size", 2, "--length", 32, "--report-to", "none")
LAYERS = ("--steps", 2, "--batch", 2, "--samples", 10, "--length", 32)
WINDOWS = ("--samples", 4, "--length", 64, "--seed", 3)
WORDS = {
    "prune": ("prune", "MODEL", "--key-dim", 8, "--score", "k", "--data", "TEXT", *WINDOWS, "--rrqr-f", 2),
    "prune by a budget": ("prune", "MODEL", "--state-mb", 0.01, "--method", "l1", "--keep-norm-eps"),
    "prune, reconstruct, distill": (
        "prune", "MODEL", "--key-dim", 8, "--data", "TEXT", "--reconstruct", "--reconstruct-steps", 2, "--distill", 2,
        "--reconstruct-samples", 10, "--reconstruct-length", 32, "--reconstruct-batch", 2,
    ),
    "reconstruct": ("reconstruct", "CUT", "--data", "TEXT", "--teacher", "MODEL", *LAYERS, "--learning-rate", 0.003),
    "reconstruct, distill": ("reconstruct", "CUT", "--data", "TEXT", *LAYERS, "--distill", 2),
    "recover": ("recover", "CUT", "--data", "TEXT", *STEPS, "--preset", "paper", "--lora-rank", 4),
    "recover mixers": ("recover", "CUT", "--data", "TEXT", *STEPS, "--mixers", "--kd-weight", 0.5),
    "train": ("train", "SHAPE", "--data", "TEXT", *STEPS, "--shared-filters", "head", "--second-beta", 0.9),
}  # fmt: skip
FAST = ("prune", "prune by a budget")


@pytest.fixture(scope="module")
def places(folders, text_file, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    slimstate.prune(folders[NAME], root / "cut", method="l1", key_dim=8)
    shape = write_shape(root / "shape.json", "delta_net")
    return {"MODEL": folders[NAME], "TEXT": text_file, "CUT": root / "cut", "SHAPE": shape}


def succeed(capsys, monkeypatch, *words: object) -> str:
    code, out, err = run(capsys, monkeypatch, *words)
    assert code == 0, err
    return out


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in WORDS])
def test_a_model_is_written_again_from_its_own_config(name, places, tmp_path, capsys, monkeypatch):
    """The config does not name the folder of the result; read from there, it gives the same tensors and config."""
    first, second = tmp_path / "first", tmp_path / "second"
    words = [places.get(word, word) for word in WORDS[name]]
    succeed(capsys, monkeypatch, *words, "--out", first)
    if "distill" in name:
        assert json.loads((first / RECONSTRUCTION).read_text())["distillation"] is not None
    code, _, err = run(capsys, monkeypatch, "run", first)
    assert (code, "`out`" in err or "--out" in err) == (2, True), "nothing is overwritten"
    succeed(capsys, monkeypatch, "run", first, "--out", second)
    assert (first / CONFIG).read_text() == (second / CONFIG).read_text()
    one, two = tiny.read_tensors(first), tiny.read_tensors(second)
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
    config = json.loads((first / CONFIG).read_text())
    assert succeed(capsys, monkeypatch, "run", first, "--dry-run").strip() == command_line(config)


MEASURED = {
    "eval": ("eval", "CUT", "--text", "TEXT", "--length", 64, "--max-tokens", 512, "--baseline", "MODEL"),
    "sweep": (
        "sweep", "MODEL", "--text", "TEXT", "--text-length", 64, "--max-tokens", 512, "--methods", "l1,drrqr",
        "--key-dims", "12,8", "--data", "TEXT", *WINDOWS,
    ),
    "analyze": ("analyze", "MODEL", "CUT", "--text", "TEXT", "--length", 64, "--skip", 16, "--every", 16),
}  # fmt: skip
VOLATILE = ("seconds", "out", "config", "command", "recommended")


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", MEASURED)
def test_a_measurement_is_repeated_from_its_own_record(name, places, tmp_path, capsys, monkeypatch):
    def record_in(out: Path) -> Path:
        return (
            out if out.is_file() else next(path for path in sorted(out.glob("*.json")) if "config" in path.read_text())
        )

    def numbers(path: Path) -> dict[str, object]:
        return {key: value for key, value in json.loads(path.read_text()).items() if key not in VOLATILE}

    suffix = ".json" if name == "eval" else ""
    first, second = tmp_path / f"first{suffix}", tmp_path / f"second{suffix}"
    succeed(capsys, monkeypatch, *[places.get(word, word) for word in MEASURED[name]], "--out", first)
    succeed(capsys, monkeypatch, "run", record_in(first), "--out", second)
    assert numbers(record_in(first)) == numbers(record_in(second))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_of_a_config_is_parsed_as_that_config(name):
    command = find_command(name)
    values = {name: ["x"] if name == "models" else "x" for name in command.inputs}
    assert command.argument in (None, *INPUTS)
    words = command_line({"command": command.name, **values}).split()[1 + len(command.name.split()) :]
    context = WorkflowCommand(command).make_context("x", list(words))
    assert {name: list(context.params[name]) if name == "models" else context.params[name] for name in values} == values
