"""Compare an engine with transformers on the same folder, token by token, in prefill and in decoding with its cache.

The engine reads windows of a text and continues the first half of each with the tokens it finds most likely.
Transformers then reads the same tokens, and the log-probabilities are compared. A token that transformers would not
have chosen is counted; where the log-probabilities agree, it was as likely.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.tensor_cut import TensorMask
from slimstate.checkpoints.writer import new_checkpoint
from slimstate.core.file_names import PLAN
from slimstate.core.surgery import Cutter
from slimstate.data.text import Windows, windows
from slimstate.models.load import load, load_tokenizer
from slimstate.models.options import RunOptions
from slimstate.models.stock import stock_model
from slimstate.records.plan import Plan, read_plan_file
from slimstate.records.serving import Differences, Outcome, Verdict
from slimstate.records.training import ReconstructionRecord, RecoveryRecord
from slimstate.serving.engines import ServedModel, rules_for
from slimstate.serving.options import ComparisonOptions, EngineOptions
from slimstate.serving.verification.engine_call import Refusal, Scores, convert_to_gguf, run_engine
from slimstate.system.errors import DataError, PlanError, quoted
from slimstate.system.json_files import JsonObject
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.value import Value

DEFAULT_TEXT = Path(__file__).with_name("text.txt")
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05, "q8_0": 0.5, "q4_k_m": 2.0}
MASKED_TOLERANCE = 0.05  # between two quantised models: an engine may round an activation up in one, down in the other
FLA_ON_CPU = (
    "flash-linear-attention's kernels run only on a GPU; on a CPU call slimstate.prepare_fla() in your own program"
)
Rows = Sequence[Sequence[float]]
NOT_FINITE = 1e8  # a difference this large comes from a score that is not a number


def read_windows(checkpoint: Checkpoint, options: ComparisonOptions) -> Windows:
    """Return windows of the text, or of the one that comes with the package, all of one length."""
    reading = options.reading(str(DEFAULT_TEXT) if options.data is None else options.data)
    rows = list(windows(load_tokenizer(checkpoint.folder), reading, options.length, max_windows=options.samples))
    full = [row for row in rows if len(row) == options.length] or rows[:1]
    if not full or len(full[0]) < 4:
        raise DataError(f"{quoted(reading.source)} has fewer than 4 tokens")
    text = Windows.of(reading, torch.stack(full))
    return text if options.data is not None else replace(text, source="the text that comes with slimstate")


class Comparison(Value):
    """An engine and transformers on the same tokens [windows, length]."""

    engine: EngineOptions
    tokens: Tensor
    options: ComparisonOptions
    run: RunOptions
    masked: bool = False
    reporter: Reporter = SILENT

    @property
    def tolerance(self) -> float:
        quantised = self.engine.gguf_type
        usual = MASKED_TOLERANCE if self.masked and quantised else TOLERANCES[quantised or self.run.precision_name]
        return self.options.tolerance or usual

    @property
    def prompt(self) -> int:
        """The number of tokens of a window that the engine continues."""
        return self.tokens.shape[1] // 2

    def compare(self, checkpoint: Checkpoint) -> tuple[str | None, Outcome]:
        """Return the engine's version and the verdict; transformers runs only after the engine has ended."""
        source = checkpoint.source
        with self.reporter.waiting(f"{self.engine.engine} runs {source}"):
            answer = self.run_engine(checkpoint)
        if isinstance(answer, Refusal):
            reason = self._known_reason(checkpoint)
            return answer.version, Outcome(model=source, verdict="refuses", words=answer.message, reason=reason)
        with self.reporter.waiting(f"transformers runs {source}"):
            differences = self.differences(checkpoint, answer)
        return answer.version, self._outcome(checkpoint, differences)

    def compare_masked(self, cut: Checkpoint, uncut: Checkpoint, plan: Plan) -> tuple[str | None, Outcome]:
        """Return the engine's version and the verdict on a cut beside the uncut model with the channels zeroed."""
        with self.reporter.waiting(f"{self.engine.engine} runs {cut.source}"):
            scores = self.run_engine(cut)
        if isinstance(scores, Refusal):
            return scores.version, Outcome(model=cut.source, verdict="refuses", words=scores.message)
        texts = self.tokens.tolist()
        windows = [[*row[: self.prompt], *more] for row, more in zip(texts, scores.continued, strict=True)]
        with tempfile.TemporaryDirectory(prefix="slimstate-") as folder:
            mask = TensorMask(uncut, Cutter(uncut.mixers, plan.selections))
            with new_checkpoint(uncut, mask, Path(folder) / "masked", force=False) as writer:
                writer.finish(mask, uncut.config, {})
            with self.reporter.waiting(f"{self.engine.engine} runs {uncut.source} with the channels zeroed"):
                masked = self.run_engine(Checkpoint.open(Path(folder) / "masked"), [*texts, *windows])
        if isinstance(masked, Refusal):
            return masked.version, Outcome(model=uncut.source, verdict="refuses", words=masked.message)
        count, start = len(windows), self.prompt - 1
        prefill, decoding = masked.prefill[:count], [row[start:] for row in masked.prefill[count:]]
        deviation = float(torch.tensor([score for row in prefill for score in row], dtype=torch.float64).std())
        pairs = zip(scores.continued, masked.continued[:count], strict=True)
        differences = Differences(
            prefill=_largest_difference(prefill, scores.prefill, deviation),
            decoding=_largest_difference(decoding, scores.decoding, deviation),
            same=sum(one == other for row, others in pairs for one, other in zip(row, others, strict=True)),
            continued=sum(map(len, scores.continued)), deviation=deviation,
        )  # fmt: skip
        return scores.version, self._outcome(cut, differences)

    def _outcome(self, checkpoint: Checkpoint, differences: Differences) -> Outcome:
        largest = differences.largest
        verdict: Verdict = "agrees" if largest is not None and largest <= self.tolerance else "differs"
        return Outcome(model=checkpoint.source, verdict=verdict, differences=differences)

    def _known_reason(self, checkpoint: Checkpoint) -> str | None:
        """Return why the engine refuses such models, where a rule says so."""
        engine = self.engine.engine
        if engine == "transformers" and checkpoint.family.library == "fla" and self.run.place.type == "cpu":
            return FLA_ON_CPU
        rules = rules_for(ServedModel.at_dims(checkpoint.config), engine)
        return next((rule.what for rule in rules if rule.verdict in ("refuses", "not supported")), None)

    def run_engine(self, checkpoint: Checkpoint, windows: list[list[int]] | None = None) -> Scores | Refusal:
        """Return the scores of the engine on the windows, or on others; llama.cpp gets the model as GGUF."""
        request = self.request(checkpoint)
        request["windows"] = request["windows"] if windows is None else windows
        if self.engine.engine != "llama.cpp":
            return run_engine(self.engine, request)
        with convert_to_gguf(checkpoint.folder, self.engine.converter, self.run.precision_name) as model:
            if isinstance(model, Refusal):
                return model
            return run_engine(self.engine, {**request, "model": str(model), "gguf_type": self.engine.gguf_type})

    def request(self, checkpoint: Checkpoint) -> JsonObject:
        """Return the request that `engine_process.py` reads."""
        return {
            "model": str(checkpoint.folder),
            "library": checkpoint.family.library,
            "dtype": self.run.precision_name,
            "vocabulary": int(stock_model(checkpoint.config).config.vocab_size),
            "windows": self.tokens.tolist(),
            "prompt": self.prompt,
            "count": self.options.tokens,
        }

    def differences(self, checkpoint: Checkpoint, scores: Scores) -> Differences:
        """Return how far the scores are from what transformers computes."""
        runtime = load(checkpoint.folder, device=self.run.device, dtype=self.run.precision_name)
        continued = torch.tensor(scores.continued, dtype=self.tokens.dtype)
        prefill = logits_of(runtime, self.tokens)
        decoding = logits_of(runtime, torch.cat([self.tokens[:, : self.prompt], continued], dim=1))
        decoding = decoding[:, self.prompt - 1 :]
        deviation = float(prefill.std())
        return Differences(
            prefill=_largest(prefill, self.tokens[:, 1:], scores.prefill, deviation),
            decoding=_largest(decoding, continued, scores.decoding, deviation),
            same=int((decoding.argmax(-1) == continued).sum()),
            continued=continued.numel(),
            deviation=deviation,
        )


def logits_of(runtime: Any, ids: Tensor) -> Tensor:
    """Return the logits [B, T - 1, V] for every token after the first, in float64."""
    with torch.no_grad():
        logits: Tensor = runtime.model(input_ids=ids.long().to(runtime.device), use_cache=False).logits
    return logits[:, :-1].double().cpu()


def _largest(logits: Tensor, tokens: Tensor, scores: Rows, deviation: float) -> float | None:
    """Return the largest difference from the log-probabilities of the tokens, in deviations; None if not finite."""
    expected = logits.log_softmax(-1).gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)
    return _largest_difference(expected.tolist(), scores, deviation)


def _largest_difference(expected: Rows, scores: Rows, deviation: float) -> float | None:
    pairs = (torch.tensor(rows, dtype=torch.float64) for rows in (scores, expected))
    largest = float(next(pairs).sub(next(pairs)).abs().max())
    return largest / deviation if largest < NOT_FINITE else None  # false for NaN too


def masking_plan(cut: Checkpoint, uncut: Checkpoint, path: Path | None) -> Plan:
    """Return the plan by which a model was cut, to zero the same channels of the uncut one."""
    plan = cut.plan if path is None else read_plan_file(path)
    if plan is None:
        raise PlanError(f"{quoted(cut.source)} has no {PLAN} of its cut: give it with `plan`")
    if any((cut.folder / name).is_file() for name in (ReconstructionRecord.FILE, RecoveryRecord.FILE)):
        raise PlanError(f"{quoted(cut.source)} was trained after its cut, so no masked model equals it: omit `masked`")
    is_exact = plan.corrected or not cut.family.correction(cut.config).possible
    if plan.rotates or plan.value_dim is not None or not is_exact:
        raise PlanError("only a corrected cut of key channels, without rotations, equals zeroed channels")
    if plan.width != uncut.mixers[0].axis.width or plan.selections.keys() != {mixer.layer for mixer in uncut.mixers}:
        raise PlanError(f"{quoted(uncut.source)} is not the uncut model: the plan is for other layers or widths")
    return plan
