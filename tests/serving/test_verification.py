"""An engine that computes the same agrees, one that computes something else differs, and one that fails is quoted."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import stand_ins
import torch

import slimstate
from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.load import load
from slimstate.records.serving import Differences, Outcome, VerificationRecord
from slimstate.records.training import ReconstructionRecord
from slimstate.serving.options import ComparisonOptions, EngineOptions
from slimstate.serving.verification import engine_process
from slimstate.serving.verification.engine_call import ProcessResult, Refusal, run_engine
from slimstate.serving.verification.verify import logits_of, read_windows

pytestmark = pytest.mark.slow
OPTIONS = {"samples": 2, "length": 16, "tokens": 3}
FLAGS = ("--samples", 2, "--length", 16, "--tokens", 3, "--device", "cpu")
MODEL = "mamba2-one-group"
LOGS = [
    ("x\nllama_model_load: error loading model: wrong shape\nValueError: no", "error loading model: wrong shape"),
    ("(EngineCore pid=3) ERROR RuntimeError: expect x\nRuntimeError: Engine failed", "RuntimeError: expect x"),
    ("/src/ggml.c:99: GGML_ASSERT(S_k == S_v) failed", "GGML_ASSERT(S_k == S_v) failed"),
    ("", "it ended with status -6"),
]


def verify(model: Path, **options) -> VerificationRecord:
    return slimstate.verify(model, **OPTIONS, **options, progress=False)


def scores_of(folder: Path, shift: float = 0.0) -> dict[str, dict[str, list]]:
    """Return what transformers computes, by the tokens that an engine reads; decoding log-probabilities are shifted."""
    runtime = load(folder, device="cpu")
    windows = read_windows(Checkpoint.open(folder), ComparisonOptions(**OPTIONS)).tokens
    scores = {}
    for window in windows.tolist():
        for tokens in (window, window[:8]):
            ids, continued, decoding = torch.tensor([tokens]), [], []
            for _ in range(OPTIONS["tokens"]):
                row = runtime.model(input_ids=ids).logits[0, -1].double().log_softmax(-1)
                continued.append(int(row.argmax()))
                decoding.append(float(row.max()) + shift)
                ids = torch.cat([ids, torch.tensor([continued[-1:]])], dim=1)
            rows = logits_of(runtime, torch.tensor([tokens]))[0].log_softmax(-1)
            prefill = [float(row[token]) for row, token in zip(rows, tokens[1:], strict=True)]
            scores[str(tokens)] = {"prefill": prefill, "continued": continued, "decoding": decoding}
    return scores


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
def test_an_engine_with_the_scores_of_transformers_agrees(engine, cut, engines, tmp_path, succeed):
    engines(scores_of(cut))
    succeed("verify", cut, "--engine", engine, *FLAGS, "--out", tmp_path / "v.json")
    record = VerificationRecord.read(tmp_path / "v.json")
    assert record.verdict.startswith(f"{engine} 0.0.1 agrees")
    assert record.outcome.differences.largest < 1e-5
    assert record.outcome.differences.same == record.outcome.differences.continued == 6
    page = slimstate.report(tmp_path, tmp_path / "page.html", progress=False)
    assert page.records == {"verification": 1}
    assert "agrees" in (tmp_path / "page.html").read_text()


def test_an_engine_that_differs_only_in_decoding_differs(cut, engines, execute):
    engines(scores_of(cut, shift=0.1))
    code, out, err = execute("verify", cut, "--engine", "vllm", *FLAGS, "--json")
    assert code == 1, err
    record = VerificationRecord.from_json(json.loads(out))
    assert record.verdict.startswith("vllm 0.0.1 differs")
    differences = json.loads(out)["outcome"]["differences"]
    assert differences["prefill"] < 1e-5
    assert differences["decoding"] == pytest.approx(0.1 / differences["deviation"], rel=1e-3)


def test_an_engine_that_ignores_the_cut_differs(cut, folders, engines):
    engines(scores_of(folders[MODEL]))
    record = verify(cut, engine="vllm", against=str(folders[MODEL]))
    assert record.outcome.verdict == "differs"
    assert record.against.verdict == "agrees"
    assert record.verdict.endswith("the cut breaks it there")


def test_an_engine_that_fails_is_quoted(cut, engines, execute):
    engines({}, error="expect head_dim to be equal to head_dim_v")
    code, out, _ = execute("verify", cut, "--engine", "vllm", *FLAGS)
    assert code == 2
    assert out.startswith("vllm 0.0.1 refuses: RuntimeError: expect head_dim to be equal to head_dim_v")


def test_kernels_that_need_a_gpu_are_the_known_reason_on_a_cpu(folders, monkeypatch):
    refusal = Refusal(version="5", message="0 active drivers")
    monkeypatch.setattr("slimstate.serving.verification.verify.run_engine", lambda *arguments: refusal)
    record = verify(folders["delta_net-plain"], engine="transformers")
    assert "refuses: 0 active drivers (known of such models: flash-linear-attention's kernels" in record.verdict
    assert "slimstate.prepare_fla()" in record.verdict


@pytest.mark.skipif("mlx_lm" in sys.modules, reason="mlx-lm is installed")
def test_without_the_engine_a_line_says_how_to_install_it(cut, refusal):
    line = refusal("verify", cut, "--engine", "mlx", *FLAGS)
    assert all(words in line for words in ('pip install "mlx[cpu]" mlx-lm', "--python"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give --engine: transformers, mlx"),
        (("--engine", "onnx"), "unknown --engine onnx; there are transformers, mlx"),
        (("--engine", "vllm", "--python", "nowhere"), "--python must be a file, got nowhere"),
        (("--engine", "llama.cpp"), "pass its convert_hf_to_gguf.py as --converter"),
        (("--engine", "vllm", "--engine-settings", "{"), "--engine-settings must be JSON"),
        (("--engine", "vllm", "--engine-settings", "[]"), "--engine-settings must be a JSON object"),
        (("--engine", "vllm", "--tokens", "0"), "--tokens must be at least 1"),
    ],
)
def test_bad_input_is_one_line(arguments, words, cut, refusal):
    assert words in refusal("verify", cut, *arguments)


def test_a_cut_that_was_trained_is_not_compared_with_a_masked_model(cut, folders, tmp_path):
    trained = shutil.copytree(cut, tmp_path / "trained")
    (trained / ReconstructionRecord.FILE).write_text("{}")
    with pytest.raises(slimstate.SlimstateError, match="was trained after its cut"):
        verify(trained, engine="mlx", against=str(folders[MODEL]), masked=True)


@pytest.mark.parametrize("masked", [False, True])
def test_transformers_by_itself_agrees(masked, cut, folders):
    record = verify(cut, engine="transformers", **({"against": str(folders[MODEL]), "masked": True} if masked else {}))
    assert record.outcome.verdict == "agrees", record.verdict


def test_an_answer_that_lacks_tokens_is_no_agreement(monkeypatch):
    request = {"windows": [[1, 2, 3]], "count": 1}
    answer = {"version": "1", "prefill": [[-1.0]], "continued": [[5]], "decoding": [[-1.0]]}
    result = ProcessResult(answer=answer, log="", status=0)
    monkeypatch.setattr("slimstate.serving.verification.engine_call.run_program", lambda *_: result)
    refusal = run_engine(EngineOptions(engine="vllm"), request)
    assert isinstance(refusal, Refusal)
    assert "it scored [1] tokens, expected [2]" in refusal.message


def test_a_score_that_is_not_a_number_agrees_with_nothing():
    differences = Differences(prefill=None, decoding=1e-7, same=0, continued=1, deviation=1.0)
    assert differences.largest is None
    assert "not a number" in Outcome(model="m", verdict="differs", differences=differences).describe()
    with pytest.raises(ValueError, match="unless the engine refuses"):
        Outcome(model="m", verdict="agrees")


@pytest.mark.parametrize(("log", "message"), LOGS)
def test_the_first_line_with_an_error_is_quoted(log, message):
    assert ProcessResult(answer={}, log=log, status=-6).message == message


def test_the_program_for_other_environments_imports_nothing_of_slimstate():
    text = Path(engine_process.__file__).read_text()
    assert "import slimstate" not in text
    assert "from slimstate" not in text


def test_logits_of_an_engine_become_log_probabilities():
    """The padding of a vocabulary does not count."""
    import numpy

    class Engine:
        def reset(self):
            self.tokens = []

        def logits(self, tokens):
            self.tokens += tokens
            rows = [[1.0, 2.0, float(token), 9.0] for token in self.tokens[-len(tokens) :]]
            return numpy.array(rows)

    request = {"windows": [[0, 2, 1]], "prompt": 1, "count": 2, "vocabulary": 3}
    answer = engine_process.score_logits(Engine(), request)
    rows = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 2.0]], dtype=torch.float64).log_softmax(-1)
    assert answer["prefill"] == [pytest.approx([float(rows[0, 2]), float(rows[1, 1])])]
    assert answer["continued"][0][0] == 1
    assert answer["decoding"][0][0] == pytest.approx(float(rows[0, 1]))
