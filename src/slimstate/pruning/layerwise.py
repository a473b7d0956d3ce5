"""Choose the channels of one layer at a time, during a reconstruction.

The channels of a layer are chosen from what really enters it after the layers before it were cut. Where a method needs
gradients of the whole model, weights alone, or evidence from a file, its plan is made before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from slimstate.checkpoints.safetensors_io import StoredTensor
from slimstate.core.evidence import Evidence
from slimstate.core.layout import Mixer
from slimstate.core.selection import Choice
from slimstate.core.surgery import Cutter
from slimstate.data.text import Windows
from slimstate.families.contract import Config
from slimstate.pruning.calibration import Sums, observed, sum_evidence
from slimstate.pruning.cut import CardNotes, cut_config, cut_documents, describe_cut
from slimstate.pruning.planning import SelectionJob, cases, certify, plan_of
from slimstate.reconstruction.walk import StoredCut, Watch
from slimstate.records.cut import CutRecord
from slimstate.records.plan import Plan, choice_from_json, choice_to_json
from slimstate.records.training import ReconstructionRecord
from slimstate.selectors import choose
from slimstate.system import distributed
from slimstate.system.json_files import JsonObject, read_json, write_json


@dataclass(frozen=True, kw_only=True)
class LayerwiseCut(StoredCut):
    """The cut that a reconstruction trains; `choices` starts with those of a plan and fills layer by layer.

    `folder` keeps the choices, so that a run that was interrupted makes the same ones.
    """

    job: SelectionJob
    folder: Path
    notes: CardNotes
    choices: dict[int, Choice] = field(default_factory=dict)
    plan: list[Plan] = field(default_factory=list)  # one, once it is known

    def config(self) -> Config:
        job = self.job
        return self.checkpoint.family.resize(self.checkpoint.config, job.request.keep, corrected=job.corrected)

    def changed(self, number: int, uncut: Mapping[str, StoredTensor], watch: Watch) -> dict[str, Tensor]:
        mixer = next((mixer for mixer in self.checkpoint.mixers if mixer.layer == number), None)
        if mixer is None:
            return {}
        if number not in self.choices:
            self.choices[number] = self._choose(mixer, watch)
        cutter = Cutter([mixer], {number: self.choices[number]}, corrected=self.job.corrected)
        return {name: cutter.apply(name, stored[...]) for name, stored in uncut.items() if cutter.touches(name)}

    def _choose(self, mixer: Mixer, watch: Watch) -> Choice:
        """Return the choice of an earlier run, or choose from the evidence that the layer gives now."""
        path, job = self.folder / f"choice-{mixer.layer}.json", self.job
        if path.is_file():
            return choice_from_json(read_json(path))
        evidence = self._evidence(mixer, watch)
        case = cases(self.checkpoint.read_rows, [mixer], job.selector.needs, {mixer.layer: evidence})
        choice = certify(choose(job.selector, case, job.request)[0], evidence)
        distributed.from_main(lambda: write_json(path, choice_to_json(choice)))
        return choice

    def _evidence(self, mixer: Mixer, watch: Watch) -> Evidence:
        needs = self.job.selector.needs - {"weight"}
        sums = {mixer.layer: Sums(mixer, self.job.run.place, needs)}
        sums[mixer.layer].tokens = watch(lambda model: observed(model, [mixer], sums, needs))
        return sum_evidence([mixer], sums)[mixer.layer]

    def finished_config(self, windows: Windows) -> JsonObject:
        if not self.plan:
            self.plan.append(plan_of(self.job, self.choices, windows.provenance()))
        return cut_config(self.checkpoint, self.plan[0])

    def change(self) -> Cutter:
        return Cutter(self.checkpoint.mixers, self.plan[0].selections, corrected=self.plan[0].corrected)

    def documents(self, record: ReconstructionRecord) -> dict[str, str]:
        plan, name = self.plan[0], Path(str(record.out)).name
        return cut_documents(plan, name, self.record(record), cut_config(self.checkpoint, plan), self.notes)

    def record(self, reconstruction: ReconstructionRecord) -> CutRecord:
        """Return the record of the cut with its reconstruction."""
        record = describe_cut(self.checkpoint, self.plan[0], reconstruction.kernels, self.notes.speed)
        return replace(record, reconstruction=reconstruction)
