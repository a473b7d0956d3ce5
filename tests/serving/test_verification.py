"""An engine that computes the same agrees, one that computes something else differs, and one that fails is quoted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import stand_ins
import torch

import slimstate
from command import run
from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.load import load
from slimstate.records.verification import Differences, Outcome, VerificationRecord
from slimstate.report import write_report
from slimstate.serving.verification import engine_process
from slimstate.serving.verification.engine_call import Ended, EngineOptions, Refused, ask
from slimstate.serving.verification.verify import VerifyOptions, logits_of, tokens_of, verify

OPTIONS = VerifyOptions(samples=2, length=16, tokens=3)
SMALL = ("--samples", 2, "--length", 16, "--tokens", 3, "--device", "cpu")
MODEL = "mamba2-one-group"


def scores_of(folder: Path, shift: float = 0.0) -> dict[str, dict[str, list]]:
    """What transformers says of the windows, by the tokens that an engine is given; log-probabilities are shifted."""
    runtime, windows = load(folder, device="cpu"), tokens_of(Checkpoint.open(folder), OPTIONS).tokens
    found = {}
    for window in windows.tolist():
        for tokens in (window, window[:8]):
            whole, made, chosen = torch.tensor([tokens]), [], []
            for _ in range(OPTIONS.tokens):
                row = runtime.model(input_ids=whole).logits[0, -1].double().log_softmax(-1)
                made.append(int(row.argmax()))
                chosen.append(float(row.max()) + shift)
                whole = torch.cat([whole, torch.tensor([made[-1:]])], dim=1)
            rows = logits_of(runtime, torch.tensor([tokens]))[0].log_softmax(-1)
            prefill = [float(row[token]) for row, token in zip(rows, tokens[1:], strict=True)]
            found[str(tokens)] = {"prefill": prefill, "continued": made, "decoding": chosen}
    return found


@pytest.fixture(scope="module")
def cut(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cut") / "cut"
    slimstate.prune(folders[MODEL], out, method="l1", key_dim=8)
    return out


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def put(scores: dict[str, dict[str, list]], error: str = "") -> None:
        for name, value in stand_ins.install(tmp_path / "engines", scores, error).items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_with_the_scores_of_transformers_agrees(engine, cut, engines, tmp_path, capsys, monkeypatch):
    engines(scores_of(cut))
    code, out, _ = run(capsys, monkeypatch, "verify", cut, "--engine", engine, *SMALL, "--out", tmp_path / "v.json")
    assert code == 0, out
    record = VerificationRecord.read(tmp_path / "v.json")
    assert record.verdict.startswith(f"{engine} 0.0.1 agrees")
    assert record.outcome.differences.largest < 1e-5
    assert record.outcome.differences.same == record.outcome.differences.continued == 6
    page = write_report(tmp_path, tmp_path / "page.html")
    assert page.records == {"verification": 1}
    assert "agrees" in (tmp_path / "page.html").read_text()


def test_an_engine_that_computes_something_else_differs(cut, engines, capsys, monkeypatch):
    """Only in decoding."""
    engines(scores_of(cut, shift=0.1))
    code, out, _ = run(capsys, monkeypatch, "verify", cut, "--engine", "vllm", *SMALL)
    assert code == 1
    assert out.startswith("vllm 0.0.1 differs")
    found = json.loads(run(capsys, monkeypatch, "verify", cut, "--engine", "vllm", *SMALL, "--json")[1])["outcome"]
    assert found["differences"]["prefill"] < 1e-5
    assert found["differences"]["decoding"] == pytest.approx(0.1 / found["differences"]["deviation"], rel=1e-3)


def test_another_model_in_the_same_folder_is_told_apart(cut, folders, engines):
    """An engine that ignores the cut: the scores of the uncut model."""
    engines(scores_of(folders[MODEL]))
    record = verify(cut, EngineOptions(engine="vllm"), options=OPTIONS, against=folders[MODEL])
    assert record.outcome.verdict == "differs"
    assert record.against.verdict == "agrees"
    assert record.verdict.endswith("the cut breaks it there")


def test_an_engine_that_fails_is_quoted(cut, engines, capsys, monkeypatch):
    engines({}, error="expect head_dim to be equal to head_dim_v")
    code, out, _ = run(capsys, monkeypatch, "verify", cut, "--engine", "vllm", *SMALL)
    assert code == 2
    assert out.startswith("vllm 0.0.1 refuses: RuntimeError: expect head_dim to be equal to head_dim_v")


def test_kernels_that_need_a_gpu_are_the_known_reason_on_a_cpu(folders, monkeypatch):
    monkeypatch.setattr(
        "slimstate.serving.verification.verify.ask", lambda *given: Refused(version="5", words="0 active drivers")
    )
    record = verify(folders["delta_net-plain"], EngineOptions(engine="transformers"), options=OPTIONS)
    assert "refuses: 0 active drivers (known of such models: flash-linear-attention's kernels" in record.verdict
    assert "slimstate.prepare_fla()" in record.verdict


@pytest.mark.skipif("mlx_lm" in sys.modules, reason="mlx-lm is there")
def test_without_the_engine_a_line_says_how_to_install_it(cut, capsys, monkeypatch):
    code, out, err = run(capsys, monkeypatch, "verify", cut, "--engine", "mlx", *SMALL)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert 'pip install "mlx[cpu]" mlx-lm' in err
    assert "--python" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "onnx"), "unknown engine onnx"),
        (("--engine", "vllm", "--python", "nowhere"), "--python nowhere is no file"),
        (("--engine", "llama.cpp"), "name its convert_hf_to_gguf.py with --converter"),
        (("--engine", "vllm", "--engine-settings", "{"), "--engine-settings is not JSON"),
        (("--engine", "vllm", "--tokens", "0"), "--tokens 0"),
    ],
)
def test_bad_input_is_one_line(arguments, words, cut, capsys, monkeypatch):
    code, _, err = run(capsys, monkeypatch, "verify", cut, *arguments)
    assert code == 2
    assert words in err


@pytest.mark.slow
def test_transformers_by_itself_agrees(cut):
    record = verify(cut, EngineOptions(engine="transformers"), options=OPTIONS)
    assert record.outcome.verdict == "agrees", record.verdict


def test_an_answer_that_lacks_tokens_is_no_agreement(monkeypatch):
    request = {"windows": [[1, 2, 3]], "count": 1}
    answers = {"version": "1", "prefill": [[-1.0]], "continued": [[5]], "decoding": [[-1.0]]}
    monkeypatch.setattr(
        "slimstate.serving.verification.engine_call.run_program", lambda *_: Ended(answer=answers, log="", status=0)
    )
    answer = ask(EngineOptions(engine="vllm"), request)
    assert isinstance(answer, Refused)
    assert "were asked for" in answer.words


def test_what_is_no_number_agrees_with_nothing():
    found = Differences(prefill=None, decoding=1e-7, same=0, continued=1, deviation=1.0)
    assert found.largest is None
    assert "not a number" in Outcome(model="m", verdict="differs", differences=found).describe()
    with pytest.raises(ValueError, match="unless the engine refuses"):
        Outcome(model="m", verdict="agrees")


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            "loading\nllama_model_load: error loading model: wrong shape\nValueError: no",
            "error loading model: wrong shape",
        ),
        (
            "(EngineCore pid=3) ERROR RuntimeError: expect x\nRuntimeError: Engine failed",
            "RuntimeError: expect x",
        ),
        ("/src/ggml.c:99: GGML_ASSERT(S_k == S_v) failed", "GGML_ASSERT(S_k == S_v) failed"),
        ("", "it ended with status -6"),
    ],
)
def test_the_first_line_that_tells_of_an_error_is_quoted(log, words):
    assert Ended(answer={}, log=log, status=-6).words(None) == words


def test_the_program_for_other_environments_imports_nothing_of_slimstate():
    for name in ("engine_process.py", "gguf_process.py"):
        text = Path(engine_process.__file__).with_name(name).read_text()
        assert "import slimstate" not in text
        assert "from slimstate" not in text


def test_logits_of_an_engine_become_log_probabilities():
    """A vocabulary that the engine pads does not count."""
    import numpy

    class Engine:
        def reset(self):
            self.seen = []

        def logits(self, tokens):
            self.seen += tokens
            rows = [[1.0, 2.0, float(token), 9.0] for token in self.seen[-len(tokens) :]]
            return numpy.array(rows)

    request = {"windows": [[0, 2, 1]], "prompt": 1, "count": 2, "vocabulary": 3}
    answer = engine_process.by_logits(Engine(), request)
    rows = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 2.0]], dtype=torch.float64).log_softmax(-1)
    assert answer["prefill"] == [pytest.approx([float(rows[0, 2]), float(rows[1, 1])])]
    assert answer["continued"][0][0] == 1
    assert answer["decoding"][0][0] == pytest.approx(float(rows[0, 1]))
