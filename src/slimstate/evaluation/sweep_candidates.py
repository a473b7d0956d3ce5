"""A candidate of a sweep as a model that runs: the uncut one under masks, or a cut that was really reconstructed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.layout import Mixer
from slimstate.data.documents import Reading
from slimstate.models.hooks import masked
from slimstate.models.load import Runtime, load, load_tokenizer
from slimstate.models.options import RunOptions
from slimstate.pruning.options import Calibration
from slimstate.pruning.planning import SelectionJob
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.records.plan import Plan
from slimstate.records.reconstruction import RECONSTRUCTION
from slimstate.system.progress import Reporter
from slimstate.workflows.prune import CutReconstruction

Running = tuple[Runtime, Sequence[Mixer]]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Makes models of plans. What a stopped sweep has reconstructed lies in `folder`, and is gone on with."""

    checkpoint: Checkpoint
    runtime: Runtime
    rescaled: bool
    reconstruct: ReconstructOptions | None
    calibration: Calibration
    run: RunOptions
    folder: Path
    reporter: Reporter

    @contextmanager
    def running(self, job: SelectionJob, plan: Plan) -> Iterator[Running]:
        """The model of a plan, ready to be measured."""
        if self.reconstruct is None:
            with masked(self.runtime.model, self.checkpoint.mixers, plan.selections, rescaled=self.rescaled):
                yield self.runtime, self.checkpoint.mixers
            return
        out = self.folder / f"{plan.method}-{plan.score}-{plan.key_dim}"
        if not (out / RECONSTRUCTION).is_file():
            self._make(job, plan, out)
        yield load(out, device=self.run.device, dtype=self.run.dtype), Checkpoint.open(out).mixers
        shutil.rmtree(out)
        with suppress(OSError):  # another candidate is still there
            self.folder.rmdir()

    def _make(self, job: SelectionJob, plan: Plan, out: Path) -> None:
        assert self.reconstruct is not None
        reading = Reading(self.calibration.data, self.calibration.documents)
        tokenizer = load_tokenizer(self.checkpoint.folder)
        windows = self.reconstruct.windows(tokenizer, reading, self.calibration.seed, job.run.place.type)
        run = CutReconstruction(out=out, options=self.reconstruct, force=False, provenance={})
        run.finish(replace(job, reporter=self.reporter), plan, windows, time.perf_counter())
