"""Run an engine in a process of its own, maybe in another environment; llama.cpp gets the model as GGUF."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slimstate.records.schema import ValidationError, from_json, is_number
from slimstate.serving.options import EngineOptions
from slimstate.system.errors import ModelError, PlanError, quoted
from slimstate.system.json_files import JsonObject
from slimstate.system.value import Value

PROGRAM = Path(__file__).with_name("engine_process.py")
OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
INSTALL: Mapping[str, str] = {
    "transformers": "pip install transformers torch",
    "mlx": 'pip install "mlx[cpu]" mlx-lm (on a Mac: pip install mlx-lm)',
    "llama.cpp": "pip install llama-cpp-python",
    "vllm": "pip install vllm, in an environment of its own",
    "sglang": "pip install sglang, in an environment of its own",
}
# how the line with the cause of an error starts, in logs of engines and in tracebacks
ERROR_LINE = re.compile(r"(GGML_ASSERT|error loading model|(?<![\w.])[A-Za-z_.]*(Error|Exception): ).*")
MAX_ERROR_LENGTH = 400  # characters
LOWEST_SCORE = -1e9  # nats: stands for what is not a finite number


class Scores(Value):
    """The answer of an engine: log-probabilities of windows, and the tokens it chose with theirs."""

    version: str
    prefill: tuple[tuple[float, ...], ...]
    continued: tuple[tuple[int, ...], ...]
    decoding: tuple[tuple[float, ...], ...]


class Refusal(Value):
    """An engine that could not load or run the model, and its error message."""

    version: str | None
    message: str


def run_engine(options: EngineOptions, request: JsonObject) -> Scores | Refusal:
    """Return the scores of the engine, or its refusal; raise a `ModelError` if it is not installed."""
    result = run_program(options.interpreter, {**request, "engine": options.engine, "options": options.settings})
    answer = result.answer
    if "missing" in answer:
        raise ModelError(
            f"{options.engine} is not installed in the environment of {quoted(options.interpreter)}"
            f" ({quoted(answer['error'])}): {INSTALL[str(options.engine)]}, or pass another interpreter as `python`"
        )
    version = answer.get("version")
    if not answer or "error" in answer:
        return Refusal(version=version, message=result.message)
    try:
        scores = from_json(Scores, {**answer, **{kind: _finite(answer[kind]) for kind in ("prefill", "decoding")}})
        _check_lengths(scores, request)
    except ValidationError as error:
        return Refusal(version=version, message=f"its answer cannot be used: {error}")
    return scores


def _finite(rows: list[list[object]]) -> list[list[object]]:
    """Return the rows with a score that agrees with nothing in place of NaN and infinite ones."""
    return [[value if is_number(value) else LOWEST_SCORE for value in row] for row in rows]


def _check_lengths(scores: Scores, request: JsonObject) -> None:
    windows = [len(window) - 1 for window in request["windows"]]
    counts = [request["count"]] * len(windows)
    for rows, expected in ((scores.prefill, windows), (scores.continued, counts), (scores.decoding, counts)):
        if [len(row) for row in rows] != expected:
            raise ValidationError(f"it scored {[len(row) for row in rows]} tokens, expected {expected}")


@contextmanager
def convert_to_gguf(folder: Path, converter: Path | None, dtype: str) -> Iterator[Path | Refusal]:
    """Yield a temporary GGUF file of the model, or the error of the converter, which runs here: it needs torch."""
    if converter is None:
        raise PlanError(
            "llama.cpp reads GGUF: pass its convert_hf_to_gguf.py as `converter`; it is in a checkout of llama.cpp and"
            " in the source archive of llama-cpp-python, under vendor/llama.cpp"
        )
    with tempfile.TemporaryDirectory(prefix="slimstate-gguf-") as temporary:
        target = Path(temporary) / "model.gguf"
        paths = {"converter": str(converter), "model": str(folder), "out": str(target)}
        result = run_program(sys.executable, {**paths, "outtype": OUTTYPES[dtype]})
        if target.is_file() and not result.answer:
            yield target
        else:
            yield Refusal(version=None, message=f"converter: {result.message}")


class ProcessResult(Value):
    """A process that has ended: its answer, empty where it wrote none, and what it printed."""

    answer: JsonObject
    log: str
    status: int

    @property
    def message(self) -> str:
        """Why it failed: the first line of the log with an error, which is the root cause."""
        lines = self.log.splitlines()
        cause = next((match[0] for match in map(ERROR_LINE.search, lines) if match), None)
        last = next((line for line in reversed(lines) if line.strip()), None)
        reason = cause or self.answer.get("error") or last or f"it ended with status {self.status}"
        return quoted(reason, MAX_ERROR_LENGTH)


def run_program(interpreter: str, request: JsonObject) -> ProcessResult:
    """Run the program beside this file, which reads a request and writes an answer."""
    with tempfile.TemporaryDirectory(prefix="slimstate-") as folder:
        request_path, answer_path, log_path = (Path(folder) / name for name in ("request.json", "answer.json", "log"))
        request_path.write_text(json.dumps(request), encoding="utf-8")
        with log_path.open("wb") as log:
            try:
                process = subprocess.run(
                    [interpreter, str(PROGRAM), str(request_path), str(answer_path)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False,
                    env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                )  # fmt: skip
            except OSError as error:
                raise PlanError(f"`python` {quoted(interpreter)} cannot be run: {error}") from error
        try:
            answer = json.loads(answer_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it ended before it had written everything
            answer = {}
        log_text = log_path.read_text(encoding="utf-8", errors="replace")
        return ProcessResult(answer=answer, log=log_text, status=process.returncode)
