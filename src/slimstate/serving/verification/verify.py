"""Compare an engine with transformers on the same folder: token by token, in prefill and in decoding with its cache.

The engine reads windows of a text and goes on from the first half of each by the tokens it finds likeliest.
Transformers then reads the same tokens, and both are asked for log-probabilities. A token that transformers would not
have chosen is counted; as long as log-probabilities agree it was as likely.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstate.checkpoints.identity import identity
from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.documents import Reading
from slimstate.data.text import Windows, windows
from slimstate.models.load import load, load_tokenizer
from slimstate.models.options import RunOptions
from slimstate.models.stock import stock_model
from slimstate.records.base import versions
from slimstate.records.parts import Text
from slimstate.records.provenance import non_defaults, run_config
from slimstate.records.schema import from_json
from slimstate.records.verification import Differences, Outcome, Verdict, VerificationRecord
from slimstate.serving.engines import Served, advice
from slimstate.serving.verification.engine_call import EngineOptions, Refused, Scores, ask
from slimstate.serving.verification.gguf_conversion import converted
from slimstate.system.errors import DataError, PlanError, quoted
from slimstate.system.json_files import JsonObject
from slimstate.system.progress import SILENT, Reporter

OUR_TEXT = Path(__file__).with_name("text.txt")
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
READS_GGUF = ("llama.cpp",)
FLA_ON_A_CPU = (
    "flash-linear-attention's kernels run on a GPU alone; on a CPU call slimstate.prepare_fla() in your own program"
)
NO_NUMBER = 1e8  # a difference as large as this comes from what is no number


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What an engine is asked about, and how near it must come.

    Parameters:
        data: the text; by default one that comes with the package.
        documents: how those of the text are told apart, by default as it suggests: lines, blank, file or rows.
        samples: windows of it.
        length: tokens in a window.
        tokens: tokens that are decoded after each.
        tolerance: the largest difference that agrees, in standard deviations of the logits.

    Examples:
        >>> more = slimstate.VerifyOptions(data="text.txt", samples=16, length=256)
        >>> slimstate.verify("slim", slimstate.EngineOptions(engine="mlx"), options=more)
    """

    data: str | None = None
    documents: str | None = None
    samples: int = 4
    length: int = 64
    tokens: int = 16
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.samples < 1 or self.length < 4 or self.tokens < 1:
            raise PlanError(
                f"`samples` {self.samples}, `length` {self.length}, `tokens` {self.tokens}: at least 1, 4 and 1"
            )
        if self.tolerance is not None and not self.tolerance > 0:
            raise PlanError(f"`tolerance` {self.tolerance}: more than 0")


def verify(
    model: str | Path,
    engine: EngineOptions,
    *,
    against: str | Path | None = None,
    options: VerifyOptions = VerifyOptions(),
    run: RunOptions = RunOptions(dtype="float32"),
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> VerificationRecord:
    """What an engine makes of a model, token by token, beside what transformers makes of it.

    Parameters:
        model: a folder or a hub id.
        engine: which one, and where it is.
        against: the model it was cut from: tells an engine that is wrong by itself from one that a cut breaks.
        options: the text, and how near the engine must come.
        run: device and precision; float32 by default, because the question is whether the function is the same.
        out: a file for the record.
        reporter: who shows progress.

    Returns:
        A record: `verdict` (agrees, differs or refuses, with the largest difference and the engine's own words).

    Examples:
        >>> print(slimstate.verify("slim", slimstate.EngineOptions(engine="mlx"), against="model").verdict)
    """
    started = time.perf_counter()
    checkpoint = Checkpoint.open(model)
    uncut = None if against is None else Checkpoint.open(against)
    text = tokens_of(checkpoint, options)
    comparison = Comparison(engine=engine, tokens=text.tokens, options=options, run=run, reporter=reporter)
    version, outcome = comparison.outcome(checkpoint)
    theirs = None if uncut is None else comparison.outcome(uncut)[1]
    told = dict(non_defaults(engine, options, run, exclude=("settings",))) | {"against": against, "out": out}
    record = VerificationRecord(
        **vars(identity(checkpoint, checkpoint.folder.name)),
        engine=engine.engine,
        engine_version=version,
        text=from_json(Text, text.describe()),
        dtype=run.precision_name,
        tolerance=comparison.tolerance,
        outcome=outcome,
        against=theirs,
        config=run_config("verify", {"model": model}, told),
        versions=versions(),
        seconds=time.perf_counter() - started,
    )
    if out is not None:
        record.write(Path(out))
    return record


def tokens_of(checkpoint: Checkpoint, options: VerifyOptions) -> Windows:
    """Windows of the text that was given, or of the one that comes with the package; all of one length."""
    reading = Reading(str(OUR_TEXT) if options.data is None else options.data, options.documents)
    tokenizer = load_tokenizer(checkpoint.folder)
    found = list(windows(tokenizer, reading, options.length, most=options.samples))
    whole = [window for window in found if len(window) == options.length] or found[:1]
    if not whole or len(whole[0]) < 4:
        raise DataError(f"{quoted(reading.source)} has fewer than 4 tokens")
    found_in = Windows.of(reading, torch.stack(whole))
    return found_in if options.data is not None else replace(found_in, source="the text that comes with slimstate")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An engine beside transformers on the same tokens [windows, length]."""

    engine: EngineOptions
    tokens: Tensor
    options: VerifyOptions
    run: RunOptions
    reporter: Reporter

    @property
    def tolerance(self) -> float:
        given = self.options.tolerance
        return TOLERANCE[self.run.precision_name] if given is None else given

    @property
    def prompt(self) -> int:
        """The tokens of a window from which the engine goes on."""
        return self.tokens.shape[1] // 2

    def outcome(self, checkpoint: Checkpoint) -> tuple[str | None, Outcome]:
        """The engine's version and the verdict on a model; transformers runs only after the engine has ended."""
        with self.reporter.waiting(f"{self.engine.engine} runs {checkpoint.source}"):
            answer = self.answer(checkpoint)
        if isinstance(answer, Refused):
            reason = self._reason(checkpoint)
            return answer.version, Outcome(
                model=checkpoint.source, verdict="refuses", words=answer.words, reason=reason
            )
        with self.reporter.waiting(f"transformers runs {checkpoint.source}"):
            found = self.differences(checkpoint, answer)
        largest = found.largest
        verdict: Verdict = "agrees" if largest is not None and largest <= self.tolerance else "differs"
        return answer.version, Outcome(model=checkpoint.source, verdict=verdict, differences=found)

    def _reason(self, checkpoint: Checkpoint) -> str | None:
        """Why the engine does not run such models, where a rule says so."""
        engine = self.engine.engine
        if engine == "transformers" and checkpoint.family.library == "fla" and self.run.place.type == "cpu":
            return FLA_ON_A_CPU
        known = advice(Served.of(checkpoint.config), engine)
        return next((rule.what for rule in known if rule.verdict in ("refuses", "not there")), None)

    def answer(self, checkpoint: Checkpoint) -> Scores | Refused:
        """What the engine says; where it reads GGUF alone, the model is converted first."""
        if self.engine.engine not in READS_GGUF:
            return ask(self.engine, self.request(checkpoint))
        with converted(checkpoint.folder, self.engine, self.run.precision_name) as model:
            if isinstance(model, Refused):
                return model
            return ask(self.engine, {**self.request(checkpoint), "model": str(model)})

    def request(self, checkpoint: Checkpoint) -> JsonObject:
        """What the engine is asked, as `engine_process.py` reads it."""
        return {
            "model": str(checkpoint.folder),
            "library": checkpoint.family.library,
            "dtype": self.run.precision_name,
            "vocabulary": int(stock_model(checkpoint.config).config.vocab_size),
            "windows": self.tokens.tolist(),
            "prompt": self.prompt,
            "count": self.options.tokens,
        }

    def differences(self, checkpoint: Checkpoint, answer: Scores) -> Differences:
        """How far the answer is from what transformers computes."""
        runtime = load(checkpoint.folder, device=self.run.device, dtype=self.run.precision_name)
        continued = torch.tensor(answer.continued, dtype=self.tokens.dtype)
        after = torch.cat([self.tokens[:, : self.prompt], continued], dim=1)
        before, made = (logits_of(runtime, ids) for ids in (self.tokens, after))
        made = made[:, self.prompt - 1 :]
        deviation = float(before.std())
        prefill = _farthest(log_probabilities(before, self.tokens[:, 1:]), answer.prefill, deviation)
        decoding = _farthest(log_probabilities(made, continued), answer.decoding, deviation)
        return Differences(
            prefill=prefill,
            decoding=decoding,
            same=int((made.argmax(-1) == continued).sum()),
            continued=continued.numel(),
            deviation=deviation,
        )


def logits_of(runtime: Any, ids: Tensor) -> Tensor:
    """The logits [B, T - 1, V] of every token after the first, in float64."""
    with torch.no_grad():
        found: Tensor = runtime.model(input_ids=ids.long().to(runtime.device), use_cache=False).logits
    return found[:, :-1].double().cpu()


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each token [B, T] under the logits [B, T, V] before it."""
    return logits.log_softmax(-1).gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)


def _farthest(expected: Tensor, found: Sequence[Sequence[float]], deviation: float) -> float | None:
    largest = float((torch.tensor(found, dtype=torch.float64) - expected).abs().max())
    return largest / deviation if largest < NO_NUMBER else None  # NaN is not less either
