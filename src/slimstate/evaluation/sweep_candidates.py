"""A candidate of a sweep as a model that runs: the uncut one under masks, or a cut that was really reconstructed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.layout import Mixer
from slimstate.core.plan import Plan
from slimstate.data.rows import Texts
from slimstate.models.hooks import masked
from slimstate.models.load import Runtime, load
from slimstate.models.options import LoadOptions, RunOptions
from slimstate.pruning.reconstructing import Reconstructing
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.records.reconstruction import RECONSTRUCTION
from slimstate.selectors import Request, Selector
from slimstate.system.progress import Reporter

Running = tuple[Runtime, Sequence[Mixer]]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Makes models of plans. What a stopped sweep has reconstructed lies in `folder`, and is gone on with."""

    checkpoint: Checkpoint
    runtime: Runtime
    rescaled: bool
    reconstruct: ReconstructOptions | None
    data: str | Texts | None
    run: RunOptions
    folder: Path
    reporter: Reporter

    @contextmanager
    def running(self, plan: Plan, selector: Selector, request: Request) -> Iterator[Running]:
        """The model of a plan, ready to be measured."""
        if self.reconstruct is None:
            with masked(self.runtime.model, self.checkpoint.mixers, plan.selections, rescaled=self.rescaled):
                yield self.runtime, self.checkpoint.mixers
            return
        out = self.folder / f"{plan.method}-{plan.score}-{plan.key_dim}"
        if not (out / RECONSTRUCTION).is_file():
            self._make(plan, selector, request, out)
        yield load(out, device=self.run.device, dtype=self.run.dtype), Checkpoint.open(out).mixers
        shutil.rmtree(out)
        with suppress(OSError):  # another candidate is still there
            self.folder.rmdir()

    def _make(self, plan: Plan, selector: Selector, request: Request, out: Path) -> None:
        assert self.data is not None
        assert self.reconstruct is not None
        work = Reconstructing(
            checkpoint=self.checkpoint,
            out=out,
            data=self.data,
            method=selector,
            request=request,
            corrected=plan.corrected,
            options=self.reconstruct,
            run=LoadOptions(**vars(self.run)),
            force=False,
            reporter=self.reporter,
        )
        work.finish(plan, {}, time.perf_counter())
