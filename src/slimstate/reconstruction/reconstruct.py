"""Reconstruct a cut model from the uncut one and a text, layer by layer, and write a plain checkpoint again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from slimstate.checkpoints.identity import identity
from slimstate.checkpoints.model_card import reconstruction_section
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import Change, StoredTensor
from slimstate.checkpoints.writer import CARD, check_output, write_checkpoint
from slimstate.data.rows import Texts, given_text
from slimstate.data.text import Windows
from slimstate.families import loader_of
from slimstate.families.contract import Config
from slimstate.models.load import check_known, load_tokenizer
from slimstate.models.options import LoadOptions
from slimstate.models.prepare import describe_kernels
from slimstate.models.stock import as_published
from slimstate.reconstruction.options import ReconstructOptions, held_out_of
from slimstate.reconstruction.trained_layers import TrainedLayers, TrainedTensors
from slimstate.reconstruction.walk import CutModel, Walk, Watch
from slimstate.records.base import versions
from slimstate.records.parts import Text
from slimstate.records.provenance import non_defaults, run_config
from slimstate.records.reconstruction import LayerErrors, ReconstructionRecord, ReconstructionSettings
from slimstate.records.schema import read, written
from slimstate.records.training import Teacher
from slimstate.system import distributed
from slimstate.system.errors import ModelError, PlanError
from slimstate.system.progress import SILENT, Reporter


def reconstruct(
    model: str | PathLike[str],
    out: str | Path,
    *,
    data: str | Path | Iterable[object],
    teacher: str | PathLike[str] | None = None,
    options: ReconstructOptions = ReconstructOptions(),
    run: LoadOptions = LoadOptions(),
    force: bool = False,
    reporter: Reporter = SILENT,
) -> ReconstructionRecord:
    """Train every cut layer of a model on a text to give what the uncut `teacher` gave, and write it to `out`.

    The teacher is by default the model it was cut from. Interrupted, the same call goes on at the layer it was in.
    Several processes share the windows, and the main one writes; all return when it has.
    """
    started, text = time.perf_counter(), given_text(data)
    distributed.join(run.place)
    cut = Checkpoint.open(model)
    check_output(cut, Path(out), force)
    uncut = find_teacher(cut, teacher, reporter)
    check_output(uncut, Path(out), force)
    for checkpoint in (cut, uncut):
        check_known(checkpoint)
    job = Job(
        cut=StoredCut(cut), teacher=uncut, out=Path(out), given={"model": cut.fingerprint, "data": str(text)},
        options=options, run=run, force=force, reporter=reporter,
    )  # fmt: skip
    windows = job.read_windows(text)
    told = {
        "teacher": teacher,
        "data": text,
        "out": out,
        **dict(non_defaults(options)),
        "device": run.device,
        "dtype": run.dtype,
    }
    with job.begun(windows) as folder:
        layers, trained = job.walk(folder, windows), folder.trained()
        made = job.record(cut, cut.config, windows, layers, trained)
        config = run_config("reconstruct", {"model": model}, told)
        record = replace(made, config=config, seconds=time.perf_counter() - started)
        job.write(cut, StoredChange(None, trained), cut.config, {CARD: _card(cut)}, record)
    return record


def find_teacher(cut: Checkpoint, given: str | PathLike[str] | None, reporter: Reporter) -> Checkpoint:
    """The model that a cut was made of: the one given, or the one that the cut names; any other is refused."""
    if cut.cut is None:
        raise ModelError(f"{cut.source} was not cut: there is nothing to reconstruct")
    if given is None:
        given = cut.cut["base_model"]
        if not Path(given).is_dir():
            raise PlanError("give the uncut model with `teacher`")
        reporter.say(f"teacher: {given}, which the model was cut from")
    teacher = Checkpoint.open(given)
    if teacher.family.model_type != cut.family.model_type:
        raise ModelError(f"{given} is a {teacher.family.model_type}, the cut model a {cut.family.model_type}")
    ancestors = [entry.get("base_fingerprint") for entry in (cut.cut, *cut.cut.get("history", ()))]
    with reporter.waiting("reading the weights for their fingerprint"):
        if teacher.fingerprint not in ancestors:
            raise ModelError(f"{cut.source} was not cut from {given}, but from {cut.cut['base_model']}")
    return teacher


@dataclass(frozen=True)
class StoredCut:
    """A cut model that lies in files."""

    checkpoint: Checkpoint

    def config(self) -> Config:
        return self.checkpoint.config

    def changed(self, number: int, uncut: Mapping[str, StoredTensor], watch: Watch) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, before in uncut.items():
            tensor = self.checkpoint.read(name)
            if tensor.shape != before.shape or not torch.equal(tensor, before[...]):
                found[name] = tensor
        return found

    def embedding(self, name: str) -> StoredTensor:
        return self.checkpoint.stored(name)


@dataclass(frozen=True)
class StoredChange:
    """Trained tensors in place of those that a cut, if any, makes."""

    cut: Change | None
    trained: TrainedTensors

    def touches(self, name: str) -> bool:
        return name in self.trained or (self.cut is not None and self.cut.touches(name))

    def shape(self, name: str, shape: Iterable[int]) -> list[int]:
        return list(shape) if self.cut is None else self.cut.shape(name, shape)

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        if name in self.trained:
            return self.trained.read(name).to(tensor.dtype)
        assert self.cut is not None
        return self.cut.apply(name, tensor)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One reconstruction: who teaches whom, and where the result goes; `given` tells it from others in that place."""

    cut: CutModel
    teacher: Checkpoint
    out: Path
    given: Mapping[str, object]
    options: ReconstructOptions
    run: LoadOptions
    force: bool
    reporter: Reporter

    def read_windows(self, data: str | Texts) -> Windows:
        with self.reporter.waiting(f"reading {data}"):
            return self.options.windows(load_tokenizer(self.teacher.folder), data, self.run.place.type)

    def settings(self, windows: Windows) -> ReconstructionSettings:
        return self.options.on(self.run.place.type, windows)

    def begun(self, windows: Windows) -> AbstractContextManager[TrainedLayers]:
        """The folder that keeps what is done until all is written."""
        begun_with = {
            "teacher": self.teacher.fingerprint,
            "tokens": windows.digest,
            "dtype": self.run.precision_name,
            **self.given,
            **dict(written(self.settings(windows))),
        }
        folder = TrainedLayers.beside(self.out)
        return folder.open(begun_with, self.reporter, force=self.force, prepare=lambda: folder)

    def walk(self, folder: TrainedLayers, windows: Windows) -> tuple[LayerErrors, ...]:
        """Train every layer, and keep what comes of it in the run folder."""
        settings = self.settings(windows)
        self.reporter.say(
            f"reconstructing {len(self.teacher.mixers)} layers: {settings.steps} steps of {settings.batch} windows each"
            f" of {settings.samples} x {settings.length} tokens"
        )
        walk = Walk(
            self.teacher, self.cut, windows.tokens, settings, run=self.run, folder=folder, reporter=self.reporter
        )
        layers = []
        for errors in walk.layers():
            kept = "" if errors.step else "; the weights of the cut stay"
            self.reporter.say(
                f"layer {errors.layer}: error {errors.held_out_before:.4f} to {errors.held_out_after:.4f}{kept}"
            )
            layers.append(errors)
        return tuple(layers)

    def record(
        self,
        model: Checkpoint,
        config: Config,
        windows: Windows,
        layers: Sequence[LayerErrors],
        trained: TrainedTensors,
    ) -> ReconstructionRecord:
        """`model` is what was reconstructed, or what was cut and reconstructed, to a model of this config."""
        settings, family = self.settings(windows), model.family
        return ReconstructionRecord(
            **{**vars(identity(model, self.out.name, config)), "loader": loader_of(family.model_type)},
            versions=versions(),
            kernels=describe_kernels(self.run.place, self.run.precision, family.library),
            seed=settings.seed,
            teacher=Teacher(model=self.teacher.source, fingerprint=self.teacher.fingerprint),
            settings=settings,
            calibration=read(Text, windows.describe()),
            held_out=held_out_of(settings.samples),
            layers=tuple(layers),
            trained_parameters=trained.elements,
            processes=distributed.count(),
            out=str(self.out),
        )

    def write(
        self,
        base: Checkpoint,
        change: Change,
        config: Config,
        documents: Mapping[str, str],
        record: ReconstructionRecord,
    ) -> list[str]:
        """The folder, whole or not at all; its card has a section more. Returns the files that were left out."""
        texts = {
            **documents,
            record.FILE: json.dumps(record.to_json(), indent=1) + "\n",
            CARD: documents[CARD] + reconstruction_section(record),
        }
        after = record.config_after(as_published(config))
        return distributed.from_main(
            lambda: write_checkpoint(base, change, after, texts, self.out, force=self.force, reporter=self.reporter)
        )


def _card(checkpoint: Checkpoint) -> str:
    path = checkpoint.folder / CARD
    return path.read_text(encoding="utf-8") if path.is_file() else ""
