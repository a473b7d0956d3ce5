"""Choose, cut and reconstruct in one walk over the layers, with one of them in memory.

The channels of a layer are chosen from what really enters it after the layers before it were cut. Where a method looks
at gradients of the whole model, at weights alone, or at evidence from a file, its plan is made before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import StoredTensor
from slimstate.core.evidence import BACKWARD, Evidence
from slimstate.core.layout import Mixer
from slimstate.core.plan import Choice, Plan, read_choice, written_choice
from slimstate.core.surgery import Cutter
from slimstate.data.rows import Texts
from slimstate.data.text import Windows
from slimstate.families.contract import Config
from slimstate.models.load import check_known
from slimstate.models.options import LoadOptions
from slimstate.pruning.calibration import Sums, summed_up, watched
from slimstate.pruning.description import cut_config, describe, documents_of
from slimstate.pruning.planning import cases, certify, plan_of
from slimstate.reconstruction.options import ReconstructOptions, within_a_cut
from slimstate.reconstruction.reconstruct import Job, StoredChange
from slimstate.reconstruction.trained_layers import TrainedLayers
from slimstate.reconstruction.walk import Watch
from slimstate.records.cut import CutRecord
from slimstate.selectors import Request, Selector, choose
from slimstate.system import distributed
from slimstate.system.json_files import read_json, write_json
from slimstate.system.progress import Reporter


@dataclass(frozen=True, kw_only=True)
class CutOnTheWay:
    """A cut whose channels are known, or are chosen layer by layer; `chosen` fills with what every mixer keeps."""

    checkpoint: Checkpoint
    method: Selector
    request: Request
    corrected: bool
    run: LoadOptions
    folder: Path
    chosen: dict[int, Choice] = field(default_factory=dict)

    def config(self) -> Config:
        return self.checkpoint.family.resize(self.checkpoint.config, self.request.keep, corrected=self.corrected)

    def embedding(self, name: str) -> StoredTensor:
        return self.checkpoint.stored(name)

    def changed(self, number: int, uncut: Mapping[str, StoredTensor], watch: Watch) -> dict[str, Tensor]:
        mixer = next((mixer for mixer in self.checkpoint.mixers if mixer.layer == number), None)
        if mixer is None:
            return {}
        if number not in self.chosen:
            self.chosen[number] = self._choose(mixer, watch)
        cutter = Cutter([mixer], {number: self.chosen[number]}, corrected=self.corrected)
        return {name: cutter.apply(name, stored[...]) for name, stored in uncut.items() if cutter.touches(name)}

    def _choose(self, mixer: Mixer, watch: Watch) -> Choice:
        """As an earlier run chose, or from the evidence that the layer now gives."""
        kept = self.folder / f"choice-{mixer.layer}.json"
        if kept.is_file():
            return read_choice(read_json(kept))
        evidence = self._evidence(mixer, watch)
        case = cases(self.checkpoint, [mixer], self.method.needs, {mixer.layer: evidence})
        choice = certify(choose(self.method, case, self.request)[0], evidence)
        distributed.from_main(lambda: write_json(kept, written_choice(choice)))
        return choice

    def _evidence(self, mixer: Mixer, watch: Watch) -> Evidence:
        needs = self.method.needs - {"weight"}
        sums = {mixer.layer: Sums(mixer, self.run.place, needs)}
        sums[mixer.layer].tokens = watch(lambda model: watched(model, [mixer], sums, needs))
        return summed_up([mixer], sums)[mixer.layer]


def chosen_on_the_way(selector: Selector, evidence: Path | None) -> bool:
    """Whether the channels can be chosen while the layers go by."""
    return selector.calibrated and not BACKWARD & selector.needs and evidence is None


@dataclass(frozen=True, kw_only=True)
class Reconstructing:
    """A cut with reconstruction, from a plan that is there or by a method that chooses on the way."""

    checkpoint: Checkpoint
    out: Path
    data: str | Texts
    method: Selector
    request: Request
    corrected: bool
    options: ReconstructOptions
    run: LoadOptions
    force: bool
    reporter: Reporter

    def finish(self, plan: Plan | None, record_config: Mapping[str, Any], started: float) -> CutRecord:
        """Walk over the layers, and write what comes of them; returns the record of the cut."""
        distributed.join(self.run.place)
        check_known(self.checkpoint)
        cut = CutOnTheWay(
            checkpoint=self.checkpoint, method=self.method, request=self.request, corrected=self.corrected,
            run=self.run, folder=TrainedLayers.beside(self.out).path,
            chosen={} if plan is None else dict(plan.selections),
        )  # fmt: skip
        given = {
            "method": self.method.name, "key_dim": self.request.keep, "score": self.request.score, "f": self.request.f,
            "corrected": self.corrected, "plan": None if plan is None else plan.to_json(), "data": str(self.data),
        }  # fmt: skip
        job = Job(
            cut=cut, teacher=self.checkpoint, out=self.out, given=given, options=self.options, run=self.run,
            force=self.force, reporter=self.reporter,
        )  # fmt: skip
        with within_a_cut():
            windows = job.read_windows(self.data)
        with job.begun(windows) as folder:
            layers, trained = job.walk(folder, windows), folder.trained()
            plan = self._planned(cut, windows) if plan is None else plan
            config = cut_config(self.checkpoint, plan)
            made = job.record(self.checkpoint, config, windows, layers, trained)
            made = replace(made, config=record_config, seconds=time.perf_counter() - started)
            record = replace(describe(self.checkpoint, plan, made.kernels), reconstruction=made)
            documents = documents_of(plan, self.out.name, record, config)
            cutter = Cutter(self.checkpoint.mixers, plan.selections, corrected=plan.corrected)
            left_out = job.write(self.checkpoint, StoredChange(cutter, trained), config, documents, made)
        seconds = time.perf_counter() - started
        return replace(record, out=str(self.out), left_out=tuple(left_out), seconds=seconds)

    def _planned(self, cut: CutOnTheWay, windows: Windows) -> Plan:
        """What was chosen on the way."""
        return plan_of(
            self.checkpoint, self.method, self.request, cut.chosen, windows.provenance(),
            corrected=self.corrected, reporter=self.reporter,
        )  # fmt: skip
