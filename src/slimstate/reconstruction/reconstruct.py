"""Train every cut layer to match the output of the uncut layer, and write a plain checkpoint again."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from slimstate.checkpoints.model_card import with_reconstruction
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import Change
from slimstate.checkpoints.writer import CARD, CheckpointWriter, new_checkpoint
from slimstate.data.text import Windows
from slimstate.families.contract import Config
from slimstate.models.load import check_tensor_names
from slimstate.models.options import LoadOptions
from slimstate.models.prepare import describe_kernels
from slimstate.models.stock import as_published
from slimstate.reconstruction.options import ReconstructOptions, count_held_out
from slimstate.reconstruction.trained_layers import TrainedLayers
from slimstate.reconstruction.walk import StoredCut, Walk
from slimstate.records.base import versions
from slimstate.records.numbers import plural
from slimstate.records.parts import ReconstructionSettings, Text
from slimstate.records.schema import from_json, to_json
from slimstate.records.training import LayerErrors, ReconstructionRecord, Teacher
from slimstate.system import distributed
from slimstate.system.errors import ModelError, PlanError
from slimstate.system.progress import Reporter
from slimstate.system.value import Value

COPYING_DEVICES = ("cuda",)  # where cores are idle while a layer is trained


def find_uncut_model(cut: Checkpoint, source: str | PathLike[str] | None, reporter: Reporter) -> Checkpoint:
    """Return the uncut model of a cut: from `source`, or from where the cut names it; refuse any other model."""
    if cut.cut is None:
        raise ModelError(f"{cut.source} was not cut: there is nothing to reconstruct")
    if source is None:
        source = cut.cut["base_model"]
        if not Path(source).is_dir():
            raise PlanError("give the uncut model with `teacher`")
        reporter.say(f"teacher: {source}, which the model was cut from")
    teacher = Checkpoint.open(source)
    teacher.check_plain("the teacher of a reconstruction")
    if teacher.family.model_type != cut.family.model_type:
        raise ModelError(f"{source} is a {teacher.family.model_type}, the cut model a {cut.family.model_type}")
    ancestors = [entry.get("base_fingerprint") for entry in (cut.cut, *cut.cut.get("history", ()))]
    with reporter.waiting("reading the weights for their fingerprint"):
        if teacher.fingerprint not in ancestors:
            raise ModelError(f"{cut.source} was not cut from {source}, but from {cut.cut['base_model']}")
    return teacher


class ReconstructionJob(Value):
    """One reconstruction of `cut` from the uncut `teacher`, written to `out`.

    A run that was interrupted continues at the layer it was in, if `identity` and all settings are the same.
    `provenance` is the config of the run. Several processes share the windows, and the main one writes.
    """

    cut: StoredCut
    teacher: Checkpoint
    out: Path
    identity: Mapping[str, object]
    options: ReconstructOptions
    run: LoadOptions
    force: bool
    provenance: Mapping[str, Any]
    reporter: Reporter

    def finish(self, windows: Windows, started: float) -> tuple[ReconstructionRecord, list[str]]:
        """Train every layer and write the result; return the record and the files that were left out."""
        distributed.join(self.run.place)
        check_tensor_names(self.teacher)
        settings = self.options.settings(self.run.place.type, windows)
        facts = {"teacher": self.teacher.fingerprint, "tokens": windows.digest, "dtype": self.run.precision_name}
        identifying = {**facts, **self.identity, **dict(to_json(settings))}
        folder = TrainedLayers.beside(self.out)
        with folder.open(identifying, self.reporter, force=self.force, prepare=lambda: None), ExitStack() as stack:
            writers = self._start_writing(folder, stack)
            layers = self._walk(folder, windows, settings, writers)
            config = self.cut.finished_config(windows)
            change = folder.change(self.cut.change())
            seconds, record = time.perf_counter() - started, self._record(config, windows, settings, layers)
            record = replace(record, trained_parameters=change.elements, seconds=seconds)
            left_out = self._write(writers, config, change, record)
        return record, left_out

    def _start_writing(self, folder: TrainedLayers, stack: ExitStack) -> list[CheckpointWriter]:
        """Return the writer of the output in the main process; on a GPU it copies what does not change from now on."""
        writers: list[CheckpointWriter] = []
        base = self.cut.checkpoint
        writer = new_checkpoint(base, folder.outline(base, self.cut.outline()), self.out, force=self.force)
        distributed.from_main(lambda: writers.append(stack.enter_context(writer)))
        for each in writers if self.run.place.type in COPYING_DEVICES else ():
            each.copy()
        return writers

    def _walk(
        self, folder: TrainedLayers, windows: Windows, settings: ReconstructionSettings,
        writers: list[CheckpointWriter],
    ) -> tuple[LayerErrors, ...]:  # fmt: skip
        self.reporter.say(
            f"reconstructing {plural(len(self.teacher.mixers), 'layer')}: {plural(settings.steps, 'step')} of"
            f" {plural(settings.batch, 'window')} each of {settings.samples} x {settings.length} tokens"
        )
        walk = Walk(
            self.teacher, self.cut, windows.tokens, settings, run=self.run, folder=folder, reporter=self.reporter
        )
        layers = []
        for errors in walk.layers():
            note = "" if errors.improved else "; it did not improve and keeps the weights of the cut"
            note = "; too small to train" if errors.negligible else note
            self.reporter.say(
                f"layer {errors.layer}: error {errors.held_out_before:.4f} to {errors.held_out_after:.4f}{note}"
            )
            layers.append(errors)
            for writer in writers:
                writer.check()
        return tuple(layers)

    def _record(
        self, config: Config, windows: Windows, settings: ReconstructionSettings, layers: tuple[LayerErrors, ...]
    ) -> ReconstructionRecord:
        model = self.cut.checkpoint
        return ReconstructionRecord(
            **{**vars(model.identity(self.out.name, config)), "loader": model.family.loader},
            kernels=describe_kernels(self.run.place, self.run.precision, model.family.library), versions=versions(),
            teacher=Teacher(model=self.teacher.source, fingerprint=self.teacher.fingerprint), config=self.provenance,
            settings=settings, calibration=from_json(Text, windows.describe()), seed=settings.seed, layers=layers,
            held_out=count_held_out(settings.samples), processes=distributed.count(), out=str(self.out),
        )  # fmt: skip

    def _write(
        self, writers: list[CheckpointWriter], config: Config, change: Change, record: ReconstructionRecord
    ) -> list[str]:
        """Write the folder, whole or not at all; return the files that were left out."""
        documents = self.cut.documents(record)
        documents |= {**record.files(), CARD: with_reconstruction(documents[CARD], record)}
        after = record.config_after(as_published(config))
        return distributed.from_main(lambda: writers[0].finish(change, after, documents, reporter=self.reporter))
