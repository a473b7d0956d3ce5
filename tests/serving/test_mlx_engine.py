"""mlx-lm computes what transformers computes, uncut and cut, for every family it knows; in its own environment.

`make engines-mlx` makes that environment and names its interpreter in SLIMSTATE_MLX_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import engine_models
import pytest

import tiny
from command import run
from places import TESTS
from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.options import RunOptions
from slimstate.records.schema import from_json
from slimstate.records.verification import VerificationRecord
from slimstate.serving.verification.engine_call import PROGRAM, EngineOptions, Scores
from slimstate.serving.verification.verify import Comparison, VerifyOptions, tokens_of, verify
from slimstate.system.json_files import write_json
from slimstate.system.progress import SILENT
from tiny_model import COMMON
from training_calls import recover, train

PYTHON = os.environ.get("SLIMSTATE_MLX_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="SLIMSTATE_MLX_PYTHON names no interpreter with mlx-lm; make engines-mlx"),
]
WIDTHS = (128, 96, 64, 32, 77)
OPTIONS = VerifyOptions(samples=2, length=48, tokens=8)
CASES = [(name, width) for name in engine_models.MODELS for width in WIDTHS]


def comparison(folder: Path) -> Comparison:
    tokens = tokens_of(Checkpoint.open(folder), OPTIONS).tokens
    run = RunOptions(device="cpu", dtype="float32")
    return Comparison(engine=EngineOptions(engine="mlx"), tokens=tokens, options=OPTIONS, run=run, reporter=SILENT)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    root, found = tmp_path_factory.mktemp("mlx"), {}
    for name in engine_models.MODELS:
        model = engine_models.uncut(name, root / name)
        for width in WIDTHS:
            found[name, width] = model if width == 128 else engine_models.cut(model, width)
    return found


@pytest.fixture(scope="module")
def answers(models: dict[tuple[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    place = tmp_path_factory.mktemp("answers")
    requests = {}
    for (name, width), folder in models.items():
        request = comparison(folder).request(Checkpoint.open(folder))
        requests[f"{name}-{width}"] = {**request, "engine": "mlx", "options": {}}
    (place / "requests.json").write_text(json.dumps(requests))
    files = [PROGRAM, place / "requests.json", place / "answers.json"]
    subprocess.run([PYTHON, TESTS / "serving" / "answer_many.py", *files], check=True)
    return json.loads((place / "answers.json").read_text())


@pytest.mark.parametrize(("name", "width"), CASES)
def test_mlx_agrees_below_a_ten_thousandth(name, width, models, answers):
    answer = answers[f"{name}-{width}"]
    assert "error" not in answer, answer
    checkpoint = Checkpoint.open(models[name, width])
    found = comparison(checkpoint.folder).differences(checkpoint, from_json(Scores, answer))
    assert found.largest is not None
    assert found.largest < 1e-4
    assert found.same == found.continued


def test_another_cut_is_told_apart(models, answers):
    """The scores of the uncut model do not pass for those of the cut one."""
    checkpoint = Checkpoint.open(models["qwen3_next", 64])
    found = comparison(checkpoint.folder).differences(checkpoint, from_json(Scores, answers["qwen3_next-128"]))
    assert found.largest is None or found.largest > 0.1


def test_the_command_says_so_in_a_line(models, tmp_path, capsys, monkeypatch):
    asked = ("--engine", "mlx", "--python", PYTHON, "--against", models["qwen3_5", 128], "--out", tmp_path / "mlx.json")
    code, out, _ = run(capsys, monkeypatch, "verify", models["qwen3_5", 64], *asked)
    assert code == 0
    assert out.startswith("mlx 0.")
    assert out.count("agrees") == 2
    record = VerificationRecord.read(tmp_path / "mlx.json")
    assert record.outcome.differences.largest < 1e-4
    assert "--engine mlx" in record.command


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2"])
def test_what_train_and_recover_write_is_read_there(name, tmp_path):
    """Configs that transformers 5 wrote: a model trained from a config, its cut, and the cut after a recovery."""
    config, text = tmp_path / "config.json", tmp_path / "text.txt"
    text.write_text(tiny.text(20_000))
    options = {**COMMON, **engine_models.MODELS[name].options, "model_type": name, "vocab_size": 300}
    write_json(config, {key: value for key, value in options.items() if value is not None})
    small = {"data": str(text), "length": 32, "steps": 1, "batch_size": 1, "device": "cpu", "report_to": "none"}
    train(config, tmp_path / "trained", **small)
    cut = engine_models.cut(tmp_path / "trained", 64)
    recover(cut, tmp_path / "recovered", **small)
    engine = EngineOptions(engine="mlx", python=Path(PYTHON))
    for folder in (tmp_path / "trained", tmp_path / "recovered"):
        record = verify(folder, engine, options=OPTIONS, run=RunOptions(device="cpu", dtype="float32"))
        assert record.outcome.verdict == "agrees", record.verdict
