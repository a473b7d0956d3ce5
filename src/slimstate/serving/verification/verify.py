"""Compare an engine with transformers on the same folder: token by token, in prefill and in decoding with its cache.

The engine reads windows of a text and goes on from the first half of each by the tokens it finds likeliest.
Transformers then reads the same tokens, and both are asked for log-probabilities. A token that transformers would not
have chosen is counted; as long as log-probabilities agree it was as likely.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstate.checkpoints.identity import identity
from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.documents import Reading
from slimstate.data.text import Windows, windows
from slimstate.models.devices import RunOptions
from slimstate.models.load import load, load_tokenizer
from slimstate.records.base import changed, command, versions
from slimstate.records.parts import Text
from slimstate.records.schema import read
from slimstate.records.verification import Differences, Outcome, Verdict, VerificationRecord
from slimstate.serving.verification.engine_call import EngineOptions, Refused, Scores, ask
from slimstate.system.errors import DataError, PlanError, named
from slimstate.system.json_files import JsonObject
from slimstate.system.progress import SILENT, Reporter

OUR_TEXT = Path(__file__).with_name("text.txt")
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
NO_NUMBER = 1e8  # a difference as large as this comes from what is no number


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The text, how much of it, how many tokens are decoded, and the largest difference that still agrees.

    In float32 by default, wherever it runs: what is asked is whether the same function is computed.
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
    """What an engine makes of a model, and of the one it was cut from; written to `out` where that is given."""
    started = time.perf_counter()
    checkpoint = Checkpoint.open(model)
    uncut = None if against is None else Checkpoint.open(against)
    text = tokens_of(checkpoint, options)
    comparison = Comparison(engine=engine, tokens=text.tokens, options=options, run=run, reporter=reporter)
    version, outcome = comparison.outcome(checkpoint)
    theirs = None if uncut is None else comparison.outcome(uncut)[1]
    told = dict(changed(engine, options, run, but=("settings",))) | {"against": against, "out": out}
    record = VerificationRecord(
        **vars(identity(checkpoint, checkpoint.folder.name)),
        engine=engine.engine,
        engine_version=version,
        text=read(Text, text.describe()),
        dtype=run.precision_name,
        tolerance=comparison.tolerance,
        outcome=outcome,
        against=theirs,
        command=command("verify", [model], told),
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
        raise DataError(f"{named(reading.source)} has fewer than 4 tokens")
    return Windows.of(reading, torch.stack(whole))


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
            answer = self._asked(checkpoint)
        if isinstance(answer, Refused):
            return answer.version, Outcome(model=checkpoint.source, verdict="refuses", words=answer.words)
        with self.reporter.waiting(f"transformers runs {checkpoint.source}"):
            found = self._differences(checkpoint, answer)
        largest = found.largest
        verdict: Verdict = "agrees" if largest is not None and largest <= self.tolerance else "differs"
        return answer.version, Outcome(model=checkpoint.source, verdict=verdict, differences=found)

    def _asked(self, checkpoint: Checkpoint) -> Scores | Refused:
        request: JsonObject = {
            "model": str(checkpoint.folder),
            "library": checkpoint.family.library,
            "dtype": self.run.precision_name,
            "windows": self.tokens.tolist(),
            "prompt": self.prompt,
            "count": self.options.tokens,
        }
        return ask(self.engine, request)

    def _differences(self, checkpoint: Checkpoint, answer: Scores) -> Differences:
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
