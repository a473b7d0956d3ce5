"""The evidence that a method needs: from a file, or by running the model over a text."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.evidence import EvidenceFile, Needs
from slimstate.core.layout import Axis
from slimstate.data.text import Windows, sample_windows, windows
from slimstate.models.load import Runtime, load_tokenizer, load_with
from slimstate.models.options import LoadOptions
from slimstate.pruning.calibration import PartialEvidence, calibrate, draw_rows
from slimstate.pruning.options import LENGTH, Calibration
from slimstate.records.numbers import plural
from slimstate.records.parts import Text
from slimstate.records.schema import ValidationError, from_json
from slimstate.selectors import Selector
from slimstate.system import distributed, threads
from slimstate.system.atomic import check_place
from slimstate.system.errors import DataError, PlanError, quoted
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.value import Value

SHORT_TEXT_WINDOWS = 8  # of a text that is shorter than one window of the default length
ENOUGH = 16  # tokens for each channel of a head, below which a choice may be poor


def read_windows(
    checkpoint: Checkpoint, methods: Sequence[Selector], calibration: Calibration, reporter: Reporter = SILENT
) -> Windows | None:
    """Return the calibration windows, or None where no method and no evidence file needs a text."""
    if calibration.evidence is not None and not calibration.evidence.is_file():
        check_place(calibration.evidence, folder=False)
    calibrated = [method.name for method in methods if method.calibrated]
    if not calibrated:
        return None
    if calibration.data is None:
        if calibration.evidence is None or not calibration.evidence.exists():
            raise PlanError(f"{calibrated[0]} needs activations: give text to calibrate on with `data`")
        return None
    with reporter.waiting(f"reading {calibration.data}"):
        width = checkpoint.mixers[0].axis.width
        windows = calibration_windows(calibration, load_tokenizer(checkpoint.folder), width, reporter)
    if windows.tokens.shape != calibration.size:
        samples, length = windows.tokens.shape
        reporter.say(f"{windows.source} is short: {plural(samples, 'window')} of {length} tokens, and no more")
    return windows


def calibration_windows(
    calibration: Calibration, tokenizer: Any, min_tokens: int = 2, reporter: Reporter = SILENT
) -> Windows:
    """Return the windows to calibrate on; a text shorter than one window of default length gives a few short ones."""
    reading, (samples, length) = calibration.reading(calibration.data), calibration.size
    if calibration.length is None:
        first = next(windows(tokenizer, reading, LENGTH, max_windows=1), None)
        tokens = 0 if first is None else len(first)
        length = LENGTH if tokens == LENGTH else max(2, tokens // SHORT_TEXT_WINDOWS)
    fewest = 1 if calibration.samples is None else None
    text = sample_windows(tokenizer, reading, samples=samples, length=length, seed=calibration.seed, min_samples=fewest)
    if (count := text.tokens.numel()) < min_tokens:
        problem = f"{text.source} gives {count} tokens to calibrate on; at least {min_tokens} are needed"
        raise DataError(f"{problem}, one for each channel of a head: use more text, `samples` or `length`")
    if count < ENOUGH * min_tokens:
        advice = f"with fewer than {ENOUGH * min_tokens:,}, {ENOUGH} for each channel of a head, it may choose poorly"
        reporter.say(f"warning: {text.source} gives {count:,} tokens to calibrate on; {advice}")
    return text


class EvidenceCollector(Value):
    """Collect evidence from a file or by running the model."""

    calibration: Calibration
    windows: Windows | None
    run: LoadOptions
    runtime: Runtime | None = None  # otherwise the model is loaded where it must run
    on_idle: Callable[[], None] = lambda: None  # starts work that can be done while the model runs
    partial: Path | None = None  # file for the sums of an unfinished calibration

    def collect(
        self, checkpoint: Checkpoint, needs: Needs, reporter: Reporter = SILENT
    ) -> tuple[EvidenceFile | None, str | None]:
        """Return the evidence that is needed, and the kernels that ran, if any; the main process saves the file."""
        needs, path = needs - {"weight"}, self.calibration.evidence
        if not needs:
            return None, None
        saved = self._read_file(checkpoint, reporter)
        if saved is not None:
            needs = saved.missing(needs)
            if not needs:
                size = f"{saved.calibration['samples']} x {saved.calibration['length']} tokens"
                reporter.say(f"evidence: {path}, {size}; no forward pass")
                return saved, None
        elif path is not None:
            # cheap in the same pass, and the file then serves the other methods too
            needs |= {"input"} if checkpoint.family.key_refusal(checkpoint.config) else {"gram", "input"}
        fresh, kernels = self._run_model(checkpoint, needs, reporter)
        evidence = fresh if saved is None else saved.extended(fresh)
        if path is not None:
            distributed.from_main(lambda: evidence.save(path))
            reporter.say(f"evidence saved to {path}")
        return evidence, kernels

    def _read_file(self, checkpoint: Checkpoint, reporter: Reporter) -> EvidenceFile | None:
        """Return what the file holds, if it exists; it must be of this model and these tokens."""
        path = self.calibration.evidence
        if path is None or not path.exists():
            return None
        saved = EvidenceFile.open(path)
        try:
            from_json(Text, saved.calibration)
        except ValidationError as error:
            raise DataError(f"{quoted(path)} is not a slimstate evidence file: {error}") from error
        with reporter.waiting("reading the weights for their fingerprint"):
            saved.check(path, checkpoint.fingerprint, None if self.windows is None else self.windows.digest)
        saved.check_fits(path, checkpoint.mixers)
        rows, expected = saved.calibration.get("rows"), self.calibration.rrqr_rows
        if rows != expected:
            raise DataError(f"{quoted(path)} sums {rows or 'all'} rows, not {expected or 'all'}: collect it again")
        return saved

    def _run_model(self, checkpoint: Checkpoint, needs: Needs, reporter: Reporter) -> tuple[EvidenceFile, str]:
        if self.windows is None:
            path, kinds = self.calibration.evidence, " and ".join(sorted(needs))
            raise DataError(f"{path} holds no {kinds} evidence, which this method needs: give text with `data`")
        hashing = threads.start(lambda: checkpoint.fingerprint)  # the disk is read while the device works
        runtime = self.runtime
        if runtime is None:
            with reporter.waiting("loading the model"), ExitStack() as stack:
                stack.callback(_warm_up_linear_algebra(checkpoint.mixers[0].axis, self.run.place, needs))
                runtime = load_with(self.run, checkpoint.folder)
            reporter.detail(f"kernels: {runtime.kernels}")
        self.on_idle()
        tokens, rows = self.windows.tokens, self.calibration.rrqr_rows
        row_mask = None if rows is None else draw_rows(tokens, rows, self.calibration.seed)
        calibration = self.windows.provenance() | ({} if rows is None else {"rows": rows})
        partial = None
        if self.partial is not None:
            digest = f"{calibration['digest']}, in part, {runtime.kernels}"
            partial = PartialEvidence(path=self.partial, calibration={**calibration, "digest": digest}, model=hashing)
        evidence = calibrate(runtime, checkpoint.mixers, tokens, needs, reporter, row_mask, partial)
        with reporter.waiting("reading the weights for their fingerprint"):
            fingerprint = hashing()
            checkpoint.check_unchanged()  # the files that were hashed are those that ran
        return EvidenceFile(model=fingerprint, calibration=calibration, evidence=evidence), runtime.kernels


def _warm_up_linear_algebra(axis: Axis, device: torch.device, needs: Needs) -> Callable[[], object]:
    """Load a GPU's libraries in a thread, by a first factorisation; return a function that waits for it."""
    if device.type == "cpu" or "gram" not in needs:
        return lambda: None

    def first() -> None:
        with suppress(RuntimeError):  # the real factorisation will raise it again
            activations = torch.zeros(axis.heads, 2048, axis.width, dtype=torch.float64, device=device)
            gram = activations.mT @ activations
            torch.linalg.cholesky(gram + torch.eye(axis.width).to(gram))

    return threads.start(first)
