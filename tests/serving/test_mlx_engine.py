"""mlx-lm computes what transformers computes, uncut and cut, for every family it has.

`make engines-mlx` creates its environment and sets SLIMSTATE_MLX_PYTHON to its interpreter.
"""

import json
import subprocess
from pathlib import Path

import engine_models
import pytest

import slimstate
import tiny
from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.options import RunOptions
from slimstate.records.schema import from_json
from slimstate.records.serving import VerificationRecord
from slimstate.serving.options import ComparisonOptions, EngineOptions
from slimstate.serving.verification.engine_call import PROGRAM, Scores
from slimstate.serving.verification.verify import Comparison, read_windows
from slimstate.system.json_files import write_json
from tiny_model import COMMON

PYTHON, pytestmark = engine_models.interpreter("mlx")
WIDTHS = (128, 96, 64, 32, 77)
OPTIONS = {"samples": 2, "length": 48, "tokens": 8}
# all requests in one process, which imports the engine once
ANSWER_MANY = """
import json, runpy, sys
from pathlib import Path
program, requests, answers = sys.argv[1:]
answer_to = runpy.run_path(program)["answer_to"]
results = {name: answer_to(request) for name, request in json.loads(Path(requests).read_text()).items()}
Path(answers).write_text(json.dumps(results))
"""
BOTH = [(name, f"{dim} x {dim}") for name in ("qwen3_next", "qwen3_5") for dim in (96, 64)]  # keys and values
ONE_GROUP = [name for name in engine_models.MODELS if name not in engine_models.SEVERAL_GROUPS]
CASES = [(name, width) for name in ONE_GROUP for width in WIDTHS] + BOTH


def comparison(folder: Path) -> Comparison:
    options = ComparisonOptions(**OPTIONS)
    tokens = read_windows(Checkpoint.open(folder), options).tokens
    run = RunOptions(device="cpu", dtype="float32")
    return Comparison(engine=EngineOptions(engine="mlx"), tokens=tokens, options=options, run=run)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    root, folders = tmp_path_factory.mktemp("mlx"), {}
    for name in engine_models.MODELS:
        model = engine_models.uncut(name, root / name)
        for width in WIDTHS:
            folders[name, width] = model if width == 128 else engine_models.cut(model, width)
        for dims in (dims for other, dims in BOTH if other == name):
            folders[name, dims] = engine_models.cut(model, int(dims.split()[0]), "state_dim")
    return folders


@pytest.fixture(scope="module")
def answers(models: dict[tuple[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("answers")
    requests = {}
    for (name, width), model in models.items():
        request = comparison(model).request(Checkpoint.open(model))
        requests[f"{name}-{width}"] = {**request, "engine": "mlx", "options": {}}
    (folder / "requests.json").write_text(json.dumps(requests))
    files = [PROGRAM, folder / "requests.json", folder / "answers.json"]
    subprocess.run([PYTHON, "-c", ANSWER_MANY, *files], check=True)
    return json.loads((folder / "answers.json").read_text())


@pytest.mark.parametrize(("name", "width"), CASES)
def test_mlx_agrees_below_a_ten_thousandth(name, width, models, answers):
    answer = answers[f"{name}-{width}"]
    assert "error" not in answer, answer
    checkpoint = Checkpoint.open(models[name, width])
    differences = comparison(checkpoint.folder).differences(checkpoint, from_json(Scores, answer))
    assert differences.largest is not None
    assert differences.largest < 1e-4
    assert differences.same == differences.continued


@pytest.mark.parametrize("width", [128, 64])
@pytest.mark.parametrize("name", engine_models.SEVERAL_GROUPS)
def test_several_groups_differ_cut_or_not(name, width, models, answers):
    """mlx-lm normalises all groups together, and transformers from 5.23 on each by itself."""
    checkpoint = Checkpoint.open(models[name, width])
    differences = comparison(checkpoint.folder).differences(checkpoint, from_json(Scores, answers[f"{name}-{width}"]))
    assert differences.largest > 0.1


def test_the_scores_of_the_uncut_model_differ_from_those_of_the_cut(models, answers):
    checkpoint = Checkpoint.open(models["qwen3_next", 64])
    scores = from_json(Scores, answers["qwen3_next-128"])
    differences = comparison(checkpoint.folder).differences(checkpoint, scores)
    assert differences.largest is None or differences.largest > 0.1


def test_the_command_prints_both_verdicts(models, tmp_path, succeed):
    flags = ("--engine", "mlx", "--python", PYTHON, "--against", models["qwen3_5", 128], "--out", tmp_path / "mlx.json")
    out = succeed("verify", models["qwen3_5", 64], *flags)
    assert out.startswith("mlx 0.")
    assert out.count("agrees") == 2
    record = VerificationRecord.read(tmp_path / "mlx.json")
    assert record.outcome.differences.largest < 1e-4
    assert "--engine mlx" in record.command


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2"])
def test_mlx_reads_what_train_and_recover_write(name, tmp_path):
    """The configs are written by transformers 5: of a model trained from a config, and of its cut after a recovery."""
    config, text = tmp_path / "config.json", tmp_path / "text.txt"
    text.write_text(tiny.text(20_000))
    options = {**COMMON, **engine_models.MODELS[name].options, "model_type": name, "vocab_size": 300}
    write_json(config, {key: value for key, value in options.items() if value is not None})
    small = {"data": str(text), "length": 32, "steps": 1, "batch_size": 1, "device": "cpu", "report_to": "none"}
    slimstate.train(config, tmp_path / "trained", **small, progress=False)
    cut = engine_models.cut(tmp_path / "trained", 64)
    slimstate.recover(cut, tmp_path / "recovered", **small, progress=False)
    for folder in (tmp_path / "trained", tmp_path / "recovered"):
        record = slimstate.verify(folder, engine="mlx", python=PYTHON, **OPTIONS, device="cpu", progress=False)
        assert record.outcome.verdict == "agrees", record.verdict
