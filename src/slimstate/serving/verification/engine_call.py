"""Ask an engine in a process of its own, perhaps of another environment, and read its answer or its complaint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimstate.records.schema import ValidationError, from_json, is_number
from slimstate.serving.engines import check_engine
from slimstate.system.errors import ModelError, PlanError, quoted
from slimstate.system.json_files import JsonObject

PROGRAM = Path(__file__).with_name("engine_process.py")
INSTALL: Mapping[str, str] = {
    "transformers": "pip install transformers torch",
    "mlx": 'pip install "mlx[cpu]" mlx-lm (on a Mac: pip install mlx-lm)',
    "llama.cpp": "pip install llama-cpp-python",
    "vllm": "pip install vllm, in an environment of its own",
    "sglang": "pip install sglang, in an environment of its own",
}
# what stands before the line that tells why, in logs of engines and in tracebacks
TELLING = re.compile(r"(GGML_ASSERT|error loading model|(?<![\w.])[A-Za-z_.]*(Error|Exception): ).*")
LONGEST_WORDS = 400
LEAST = -1e9  # nats: for what is no number


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which engine is asked, and how it is started.

    Parameters:
        engine: transformers, mlx, llama.cpp, vllm or sglang.
        python: the interpreter of the environment that has it; by default this one.
        converter: a program that writes GGUF, for llama.cpp: its own convert_hf_to_gguf.py.
        settings: what the engine is told beside the model, by its own names.

    Examples:
        >>> slimstate.verify("slim", slimstate.EngineOptions(engine="mlx", python=Path("mlx/bin/python")))
    """

    engine: str
    python: Path | None = None
    converter: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_engine(self.engine)
        for name in ("python", "converter"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise PlanError(f"`{name}` {quoted(path)} is no file")

    @property
    def interpreter(self) -> str:
        return sys.executable if self.python is None else str(self.python)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What an engine answers: log-probabilities of windows, and tokens it chose with theirs."""

    version: str
    prefill: tuple[tuple[float, ...], ...]
    continued: tuple[tuple[int, ...], ...]
    decoding: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """An engine that could not load or run the model, in its own words."""

    version: str | None
    words: str


def ask(options: EngineOptions, request: JsonObject) -> Scores | Refused:
    """What the engine makes of the request; where it is not installed, an error says how to install it."""
    whole = {**request, "engine": options.engine, "options": dict(options.settings)}
    ended = run_program(options.interpreter, PROGRAM, whole)
    answer = ended.answer
    if "missing" in answer:
        raise ModelError(
            f"{options.engine} is not installed in the environment of {quoted(options.interpreter)}"
            f" ({quoted(answer['error'])}): {INSTALL[options.engine]}, or name another interpreter with `python`"
        )
    if not answer or "error" in answer:
        return Refused(version=answer.get("version"), words=ended.words(answer.get("error")))
    try:
        return _complete(from_json(Scores, _finite(answer)), request)
    except ValidationError as error:
        return Refused(version=answer.get("version"), words=f"its answer cannot be used: {error}")


def _finite(answer: JsonObject) -> JsonObject:
    """With what is no finite number as the least that records hold, which agrees with nothing."""
    kinds = ("prefill", "decoding")
    rows = {kind: [[value if is_number(value) else LEAST for value in row] for row in answer[kind]] for kind in kinds}
    return {**answer, **rows}


def _complete(scores: Scores, request: JsonObject) -> Scores:
    """Refuse an answer that lacks tokens."""
    lengths = [len(window) - 1 for window in request["windows"]]
    counts = [request["count"]] * len(lengths)
    for rows, expected in ((scores.prefill, lengths), (scores.continued, counts), (scores.decoding, counts)):
        if [len(row) for row in rows] != expected:
            raise ValidationError(f"{[len(row) for row in rows]} tokens were scored where {expected} were asked for")
    return scores


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that has ended: its answer, empty where it gave none, and what it printed."""

    answer: JsonObject
    log: str
    status: int

    def words(self, error: str | None) -> str:
        """Why it failed, in the engine's own words: the first line that tells of an error, for that is its root."""
        found = next((match[0] for match in map(TELLING.search, self.log.splitlines()) if match), None)
        last = next((line for line in reversed(self.log.splitlines()) if line.strip()), None)
        return quoted(found or error or last or f"it ended with status {self.status}", LONGEST_WORDS)


def run_program(interpreter: str, program: Path, request: JsonObject, arguments: Sequence[str] = ()) -> Ended:
    """Run one of the programs beside this file, which read a request and write an answer."""
    with tempfile.TemporaryDirectory(prefix="slimstate-") as place:
        asked, answered, log = (Path(place) / name for name in ("request.json", "answer.json", "log.txt"))
        asked.write_text(json.dumps(request), encoding="utf-8")
        with log.open("wb") as sink:
            try:
                done = subprocess.run(
                    [interpreter, str(program), str(asked), str(answered), *arguments],
                    stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, check=False,
                    env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                )  # fmt: skip
            except OSError as error:
                raise PlanError(f"`python` {quoted(interpreter)} cannot be run: {error}") from error
        try:
            answer = json.loads(answered.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it ended before it had written all
            answer = {}
        return Ended(answer=answer, log=log.read_text(encoding="utf-8", errors="replace"), status=done.returncode)
