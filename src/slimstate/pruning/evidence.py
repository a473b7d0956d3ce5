"""The evidence that a method needs: from a file, or by running the model over a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.evidence import EvidenceFile, Need
from slimstate.core.layout import Axis
from slimstate.data.text import Windows
from slimstate.models.load import Runtime, load_tokenizer
from slimstate.models.offload import load_with
from slimstate.models.options import LoadOptions
from slimstate.pruning.calibration import calibrate
from slimstate.pruning.options import Calibration
from slimstate.selectors import Selector
from slimstate.system import distributed, threads
from slimstate.system.atomic import check_place
from slimstate.system.errors import DataError, PlanError
from slimstate.system.progress import SILENT, Reporter


def read_windows(
    checkpoint: Checkpoint, selector: Selector, calibration: Calibration, reporter: Reporter = SILENT
) -> Windows | None:
    """The calibration tokens; None where no text was given and none is needed."""
    if calibration.evidence is not None and not calibration.evidence.is_file():
        check_place(calibration.evidence, folder=False)
    if not selector.calibrated:
        return None
    if calibration.data is None:
        if calibration.evidence is None or not calibration.evidence.exists():
            raise PlanError(f"{selector.name} looks at activations: give text to calibrate on with `calibration`")
        return None
    with reporter.waiting(f"reading {calibration.data}"):
        windows = calibration.windows(load_tokenizer(checkpoint.folder))
    if windows is not None and windows.tokens.shape != calibration.size:
        samples, length = windows.tokens.shape
        reporter.say(f"{windows.source} is short: {samples} windows of {length} tokens are all it has")
    return windows


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """All it takes to have evidence: the text, its windows, where the model runs, or the model itself.

    The model is loaded only where it must run and is not at hand as `runtime`; `meanwhile` begins what can be done
    while it runs.
    """

    calibration: Calibration
    windows: Windows | None
    run: LoadOptions
    runtime: Runtime | None = None
    meanwhile: Callable[[], None] = lambda: None

    def gather(
        self, checkpoint: Checkpoint, needs: frozenset[Need], reporter: Reporter = SILENT
    ) -> tuple[EvidenceFile | None, str | None]:
        """What is needed, from the file or by running the model, and the kernels that ran, if any did.

        Of several processes the main one saves the file, after all have looked for it.
        """
        needs, path = needs - {"weight"}, self.calibration.evidence
        if not needs:
            return None, None
        found = self._found(checkpoint, reporter)
        if found is not None:
            needs = found.missing(needs)
            if not needs:
                size = f"{found.calibration['samples']} x {found.calibration['length']} tokens"
                reporter.say(f"evidence: {path}, {size}; no forward pass")
                return found, None
        elif path is not None:
            needs |= {"gram", "input"}  # cheap in the same pass, and the file then serves the other methods too
        fresh, kernels = self._collect(checkpoint, needs, reporter)
        whole = fresh if found is None else found.extended(fresh)
        if path is not None:
            distributed.from_main(lambda: whole.save(path))
            reporter.say(f"evidence saved to {path}")
        return whole, kernels

    def _found(self, checkpoint: Checkpoint, reporter: Reporter) -> EvidenceFile | None:
        """What the file holds, where it is there; it must be of this model and of these tokens."""
        path = self.calibration.evidence
        if path is None or not path.exists():
            return None
        found = EvidenceFile.open(path)
        with reporter.waiting("reading the weights for their fingerprint"):
            found.check(path, checkpoint.fingerprint, None if self.windows is None else self.windows.digest)
        found.check_fits(path, checkpoint.mixers)
        return found

    def _collect(self, checkpoint: Checkpoint, needs: frozenset[Need], reporter: Reporter) -> tuple[EvidenceFile, str]:
        if self.windows is None:
            path, lacking = self.calibration.evidence, " and ".join(sorted(needs))
            raise DataError(f"{path} holds no {lacking} evidence, which is needed here: give `calibration` text too")
        hashing = threads.start(lambda: checkpoint.fingerprint)  # the disk is read while the device works
        runtime = self.runtime
        if runtime is None:
            axis, device = checkpoint.mixers[0].axis, self.run.place
            with reporter.waiting("loading the model"), _waking_linear_algebra(axis, device, needs):
                runtime = load_with(self.run, checkpoint.folder)
            reporter.say(f"kernels: {runtime.kernels}")
        self.meanwhile()
        evidence = calibrate(runtime, checkpoint.mixers, self.windows.tokens, needs, reporter)
        with reporter.waiting("reading the weights for their fingerprint"):
            fingerprint = hashing()
            checkpoint.check_unchanged()  # what ran was loaded from the files that were digested
        return EvidenceFile(
            model=fingerprint, calibration=self.windows.provenance(), evidence=evidence
        ), runtime.kernels


@contextmanager
def _waking_linear_algebra(axis: Axis, device: torch.device, needs: frozenset[Need]) -> Iterator[None]:
    """Beside the body, a first Gram matrix and its factors on a GPU, which load libraries; both are awaited.

    Loading them, up to most of a second, must be over before there is another one.
    """
    if device.type == "cpu" or "gram" not in needs:
        yield
        return

    def first() -> Tensor:
        activations = torch.zeros(axis.heads, 2048, axis.width, dtype=torch.float64, device=device)
        gram = activations.mT @ activations
        return torch.linalg.cholesky(gram + torch.eye(axis.width).to(gram))

    done = threads.start(first)
    try:
        yield
    finally:
        with suppress(RuntimeError):  # the one that counts will say so
            done()
