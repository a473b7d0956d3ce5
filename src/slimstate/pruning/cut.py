"""Write the model that a plan describes, at once or layer by layer during a reconstruction."""

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from slimstate.checkpoints.formats import unquantised, with_plain_modules
from slimstate.checkpoints.model_card import cut_card
from slimstate.checkpoints.reader import Checkpoint, described_mixers
from slimstate.checkpoints.safetensors_io import StoredTensor
from slimstate.checkpoints.tensor_cut import TensorCut
from slimstate.checkpoints.writer import CARD, CheckpointWriter, new_checkpoint
from slimstate.core.file_names import CONFIG, PLAN
from slimstate.core.layout import Mixer
from slimstate.core.selection import Choice
from slimstate.core.surgery import Cutter, outline
from slimstate.data.text import Windows
from slimstate.families.contract import Config
from slimstate.families.fla_layout import SHARED_FILTERS
from slimstate.models.prepare import has_library
from slimstate.models.stock import Difference, as_published, stock_differences
from slimstate.pruning.calibration import Sums, collecting, sum_evidence
from slimstate.pruning.options import MIB
from slimstate.pruning.planning import SelectionJob, plan_of
from slimstate.pruning.sizes import parameters_after, state_bytes
from slimstate.reconstruction.walk import RunMixer, StoredCut
from slimstate.records.cut import CutRecord
from slimstate.records.plan import VALUE_FIELDS, CutFacts, Plan, choice_from_json, choice_to_json
from slimstate.records.provenance import config_file
from slimstate.records.serving import LayerSpeed
from slimstate.records.training import ReconstructionRecord
from slimstate.system import distributed
from slimstate.system.errors import ModelError, quoted
from slimstate.system.json_files import JsonObject, read_json, write_json
from slimstate.system.progress import Reporter


def check_stock_shapes(checkpoint: Checkpoint, key_dim: int, value_dim: int | None, reporter: Reporter) -> None:
    """Check that every tensor has the shape that the stock class expects, before the cut and after it."""
    TensorCut(checkpoint, outline(checkpoint.mixers, key_dim, value_dim))  # refuses what quantised weights do not allow
    if not has_library(checkpoint.family.library):
        reporter.say("flash-linear-attention is not installed: the tensors are not compared with its class")
        return
    with reporter.waiting("comparing the tensors with the stock class"):
        is_whole, shapes = checkpoint.quantisation is None, _stock_shapes(checkpoint)
        for name, shape, expected in _differences(checkpoint, checkpoint.config, shapes, is_whole=is_whole):
            if shape is None:
                raise ModelError(f"{checkpoint.folder} has no tensor {name}, which its config needs")
            if expected is None:
                raise ModelError(f"{checkpoint.folder} has a tensor {quoted(name)}, which its config has no place for")
            raise ModelError(f"{checkpoint.folder}: {name} is {shape} where the config says {expected}")
        mixers = checkpoint.mixers if is_whole else described_mixers(checkpoint.config)
        places, cut = tuple(f"{mixer.place_in_files}." for mixer in mixers), outline(mixers, key_dim, value_dim)
        after = {name: cut.shape(name, shape) for name, shape in shapes.items() if name.startswith(places)}
        resized = checkpoint.family.resize(checkpoint.config, key_dim, value_dim)
        for name, shape, expected in _differences(checkpoint, resized, after, is_whole=False):
            raise AssertionError(f"{name} would be {shape} where the stock class expects {expected}")


def _stock_shapes(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Return the shapes of tensors by their names in stock files; of quantised files, of those that a cut changes."""
    if checkpoint.quantisation is None:
        return {name: list(shape) for name, shape in checkpoint.shapes.items()}
    pairs = zip(described_mixers(checkpoint.config), checkpoint.mixers, strict=True)
    names = {stock.name_of(slot): own.name_of(slot) for stock, own in pairs for slot in own.axis.slots}
    shapes = {name: list(checkpoint.shapes[own]) for name, own in names.items()}
    is_mlx = checkpoint.quantisation.method == "mlx"  # it stores a convolution as [rows, taps, 1]
    return {name: [shape[0], 1, shape[1]] if is_mlx and shape[2:] == [1] else shape for name, shape in shapes.items()}


def _differences(
    checkpoint: Checkpoint, config: Config, shapes: Mapping[str, list[int]], *, is_whole: bool
) -> list[Difference]:
    """Return what the stock class would not load of these tensors, which are the whole model or a part of it."""
    differences = stock_differences(unquantised(config), shapes)
    if is_whole:
        return differences
    return [each for each in differences if {each[0], *checkpoint.stored_names(each[0])} & shapes.keys()]


def dequantised_line(checkpoint: Checkpoint, key_dim: int, value_dim: int | None) -> str | None:
    """Return what it costs that some quantised weights become bfloat16 in a cut, or None if none do."""
    if not (weights := checkpoint.dequantised):
        return None
    cut = TensorCut(checkpoint, outline(checkpoint.mixers, key_dim, value_dim))
    more = sum(math.prod(cut.shape(weight.name, weight.shape)) for weight in weights)
    modules = ", ".join(sorted({weight.module.rpartition(".")[2] for weight in weights}))
    size = " x ".join(map(str, weights[0].block))
    price = f"the weights become bfloat16: {more / MIB:,.1f} MiB more"
    return f"{modules}: scales of {size} blocks cannot be cut, so {price}"


def cut_config(checkpoint: Checkpoint, plan: Plan) -> JsonObject:
    """Return the config of the cut model, with the cut described under the key `slimstate`."""
    resized = checkpoint.family.resize(checkpoint.config, plan.key_dim, plan.value_dim, corrected=plan.corrected)
    config = as_published(resized)
    if plain := checkpoint.dequantised:
        (running, stored), names = checkpoint.roots, [weight.module for weight in plain]
        alone = [running + name.removeprefix(stored) for name in names]  # in the language model alone
        config = with_plain_modules(config, list(dict.fromkeys([*names, *alone])))
    previous = checkpoint.config.get("slimstate") or {}
    before = {key: value for key, value in previous.items() if key != "history"}
    values = () if plan.value_dim is None else VALUE_FIELDS
    facts = ("method", "score", "width", "key_dim", *values, "corrected", "correction")
    config["slimstate"] = {
        "version": plan.versions.get("slimstate"),
        "base_model": plan.model.source,
        "base_fingerprint": plan.model.fingerprint,
        **{name: getattr(plan, name) for name in facts},
        **{key: value for key, value in before.items() if key == SHARED_FILTERS},  # true after a cut as before it
        "history": [*previous.get("history", []), before] if previous else [],
    }
    return config


def describe_cut(checkpoint: Checkpoint, plan: Plan, kernels: str | None, speed: LayerSpeed | None) -> CutRecord:
    """Return the record of a cut that is not written yet."""
    mixers, dims = checkpoint.mixers, (plan.key_dim, plan.value_dim)
    return CutRecord(
        model=checkpoint.source,
        **{item.name: getattr(plan, item.name) for item in fields(CutFacts)},
        compression=plan.compression,
        noncommuting=(mixers[0].noncommuting or ()) if plan.rotates else None,
        state_bytes={"before": state_bytes(mixers, plan.width), "after": state_bytes(mixers, *dims)},
        parameters={"before": checkpoint.parameters, "after": parameters_after(checkpoint, *dims)},
        dequantised=dequantised_line(checkpoint, *dims),
        speed=speed,
        certificate=plan.summary(),
        kernels=kernels,
        out=None,
        seconds=0.0,
        plan=plan,
    )


def planned_cut(checkpoint: Checkpoint, plan: Plan) -> TensorCut:
    cutter = Cutter(checkpoint.mixers, plan.selections, corrected=plan.corrected, read=checkpoint.read)
    return TensorCut(checkpoint, cutter)


@dataclass(frozen=True, kw_only=True)
class CutJob:
    """One cut of a model, written to `out` where there is one; `provenance` is the config of the run."""

    checkpoint: Checkpoint
    key_dim: int
    value_dim: int | None
    out: Path | None
    force: bool
    provenance: Mapping[str, Any]
    speed: LayerSpeed | None
    notes: Callable[[Config], str]  # of the model card
    reporter: Reporter

    def finish(self, choice: SelectionJob | Plan, started: float) -> CutRecord:
        """Choose the channels, unless there is a plan, and return the record of the cut; the main process writes it."""
        with ExitStack() as stack:
            writers: list[CheckpointWriter] = []  # one in the main process, where the cut is written
            if self.out is not None:
                writer = new_checkpoint(self.checkpoint, self.outline(), self.out, force=self.force)
                distributed.from_main(lambda: writers.append(stack.enter_context(writer)))

            def copy() -> None:
                for writer in writers:
                    writer.copy()

            plan, kernels = (choice, None) if isinstance(choice, Plan) else choice.plan(on_idle=copy)
            if plan.rotates and (others := self.checkpoint.mixers[0].noncommuting):
                self.reporter.say(f"the rotation is not exact: it does not commute with {' and '.join(others)}")
            record = describe_cut(self.checkpoint, plan, kernels, self.speed)
            if self.out is not None:
                left_out = distributed.from_main(lambda: self._write(writers[0], plan, record))
                record = replace(record, out=str(self.out), left_out=tuple(left_out))
        return replace(record, seconds=time.perf_counter() - started)

    def outline(self) -> TensorCut:
        """Return the shapes of the cut, before its channels are chosen."""
        return TensorCut(self.checkpoint, outline(self.checkpoint.mixers, self.key_dim, self.value_dim))

    def documents(self, plan: Plan, record: CutRecord, config: Config) -> dict[str, str]:
        """Return the texts that lie beside the weights: the plan and the model card."""
        assert self.out is not None
        card = cut_card(plan, self.out.name, record, config["slimstate"]["history"])
        return {PLAN: json.dumps(plan.to_json(), indent=1) + "\n", CARD: card + self.notes(config)}

    def _write(self, writer: CheckpointWriter, plan: Plan, record: CutRecord) -> list[str]:
        config = cut_config(self.checkpoint, plan)
        documents = {**self.documents(plan, record, config), CONFIG: config_file(self.provenance)}
        return writer.finish(planned_cut(self.checkpoint, plan), config, documents, reporter=self.reporter)


@dataclass(frozen=True, kw_only=True)
class LayerwiseCut(StoredCut):
    """A cut whose layers are cut and trained one after the other; `choices` has those of a plan, or grows by layer.

    The channels of a layer are chosen from its inputs after the layers before it were cut. If a method needs gradients
    of the whole model, weights alone, or evidence from a file, the plan is computed before. `folder` stores the
    choices, so that a run that was interrupted continues with the same ones.
    """

    cut: CutJob
    job: SelectionJob
    folder: Path
    choices: dict[int, Choice] = field(default_factory=dict)
    plan: list[Plan] = field(default_factory=list)  # one, once it is known

    def config(self) -> Config:
        job, family = self.job, self.checkpoint.family
        return family.resize(self.checkpoint.config, job.request.keep, job.value_dim, corrected=job.corrected)

    def changed(self, number: int, uncut: Mapping[str, StoredTensor], run_mixer: RunMixer) -> dict[str, Tensor]:
        mixer = next((mixer for mixer in self.checkpoint.mixers if mixer.layer == number), None)
        if mixer is None:
            return {}
        if number not in self.choices:
            self.choices[number] = self._choose(mixer, run_mixer)
        choices = {number: self.choices[number]}
        cutter = Cutter([mixer], choices, corrected=self.job.corrected, read=lambda name: uncut[name][...])
        return {name: cutter.apply(name, stored[...]) for name, stored in uncut.items() if cutter.touches(name)}

    def _choose(self, mixer: Mixer, run_mixer: RunMixer) -> Choice:
        """Return the choice of an earlier run, or choose from the evidence that the layer gives now."""
        path, job = self.folder / f"choice-{mixer.layer}.json", self.job
        if path.is_file():
            return choice_from_json(read_json(path))
        needs = job.needs - {"weight"}
        sums = {mixer.layer: Sums(mixer, job.run.place, needs)}
        sums[mixer.layer].tokens = run_mixer(lambda model: collecting(model, [mixer], sums, needs))
        choice = job.choices([mixer], sum_evidence([mixer], sums))[mixer.layer]
        distributed.from_main(lambda: write_json(path, choice_to_json(choice)))
        return choice

    def finished_config(self, windows: Windows) -> JsonObject:
        if not self.plan:
            self.plan.append(plan_of(self.job, self.choices, windows.provenance()))
        return cut_config(self.checkpoint, self.plan[0])

    def outline(self) -> TensorCut:
        return self.cut.outline()

    def change(self) -> TensorCut:
        return planned_cut(self.checkpoint, self.plan[0])

    def documents(self, record: ReconstructionRecord) -> dict[str, str]:
        return self.cut.documents(self.plan[0], self.record(record), cut_config(self.checkpoint, self.plan[0]))

    def record(self, reconstruction: ReconstructionRecord) -> CutRecord:
        record = describe_cut(self.checkpoint, self.plan[0], reconstruction.kernels, self.cut.speed)
        return replace(record, reconstruction=reconstruction)
