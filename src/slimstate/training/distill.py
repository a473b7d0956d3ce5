"""A short distillation of a whole model after its reconstruction, on the same text; taken only where it helps.

The mixers, all their weights, learn from the uncut model and hardly from the text itself: it is short, and would be
learnt by heart. The windows that the reconstruction held out are held out here too, and decide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.writer import check_apart, check_output
from slimstate.data.corpus import Corpus
from slimstate.data.rows import Texts, given_text
from slimstate.data.text import Windows
from slimstate.evaluation.perplexity import TextSize
from slimstate.models.load import load_tokenizer
from slimstate.models.options import LoadOptions, RunOptions
from slimstate.pruning.budget import Budget
from slimstate.pruning.description import describe
from slimstate.pruning.options import Calibration, CutOptions
from slimstate.pruning.planning import read_plan
from slimstate.pruning.prune import prune as pruned
from slimstate.reconstruction.options import ReconstructOptions, held_out_of, within_a_cut
from slimstate.reconstruction.reconstruct import find_teacher
from slimstate.reconstruction.reconstruct import reconstruct as rebuilt
from slimstate.records.cut import CutRecord
from slimstate.records.reconstruction import RECONSTRUCTION, Distilled, ReconstructionRecord
from slimstate.records.training import RECOVERY, RecoveryRecord
from slimstate.selectors import Method, selector_named
from slimstate.system import distributed
from slimstate.system.atomic import publish, write_text
from slimstate.system.errors import PlanError
from slimstate.system.json_files import read_json, write_json
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.run_folders import RunFolder
from slimstate.training.options import RecoverOptions, TrainerOptions, TrainingText, TrainOptions
from slimstate.training.recover import RECOVERED
from slimstate.training.run_checkpoints import TrainingFolder
from slimstate.training.session import Job, Session
from slimstate.training.teacher import Distillation
from slimstate.training.tokens import Tokens

LEARNING_RATE = 2e-4
TEACHER = 100.0  # its weight beside the text itself
BATCH = {"cuda": 16, "cpu": 4}
RECONSTRUCTED, DISTILLED = "reconstructed", "distilled"  # folders with the model before and after
WINNER = "winner.json"  # which of them takes the place of the output


def prune(
    model: str | PathLike[str],
    out: str | Path | None,
    *,
    key_dim: int | None = None,
    compression: float | None = None,
    budget: Budget | None = None,
    method: Method = "drrqr",
    calibration: Calibration | str | Path | Iterable[object] | None = None,
    options: CutOptions = CutOptions(),
    run: LoadOptions = LoadOptions(),
    reporter: Reporter = SILENT,
) -> CutRecord:
    """`pruning.prune`, with a distillation after the reconstruction where the options ask for one."""
    given = Calibration.of(calibration)

    def cut(place: str | Path | None, told: CutOptions) -> CutRecord:
        return pruned(
            model, place, key_dim=key_dim, compression=compression, budget=budget, method=method, calibration=given,
            options=told, run=run, reporter=reporter,
        )  # fmt: skip

    rebuilding = options.reconstruct
    if out is None or rebuilding is None or rebuilding.distill is None:
        return cut(out, options)
    if given.data is None:
        raise PlanError("a distillation is trained on text: give it with `calibration`")
    made: list[CutRecord] = []
    uncut = Checkpoint.open(model)
    asked = {
        "model": uncut.fingerprint, "key_dim": key_dim, "compression": compression, "budget": budget, "run": run,
        "method": selector_named(method).name, "calibration": given, "options": replace(options, force=False),
    }  # fmt: skip
    record = Distilling(
        out=Path(out), teacher=uncut, data=given.data, run=run, force=options.force,
        options=replace(rebuilding, documents=given.documents), asked=asked, reporter=reporter, naming=within_a_cut,
    ).finish(lambda place, told: made.append(cut(place, replace(options, reconstruct=told, force=True))))  # fmt: skip
    found = made[0] if made else describe(uncut, read_plan(Path(out), uncut), record.kernels)
    return replace(found, reconstruction=record, out=str(out))


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
    """`reconstruction.reconstruct`, with a distillation afterwards where the options ask for one."""
    text = given_text(data)

    def rebuild(place: Path, told: ReconstructOptions, force: bool) -> ReconstructionRecord:
        return rebuilt(model, place, data=text, teacher=teacher, options=told, run=run, force=force, reporter=reporter)

    if options.distill is None:
        return rebuild(Path(out), options, force)
    cut = Checkpoint.open(model)
    check_apart(cut, Path(out))
    uncut = find_teacher(cut, teacher, reporter)
    asked = {"model": cut.fingerprint, "data": text, "teacher": uncut.fingerprint, "options": options, "run": run}
    return Distilling(
        out=Path(out), teacher=uncut, data=text, run=run, force=force, options=options, asked=asked, reporter=reporter
    ).finish(lambda place, told: rebuild(place, told, True))


@dataclass(frozen=True)
class DistillationFolder(RunFolder):
    """The folder of an unfinished distillation: the model before and after it, and their own run folders."""

    WORK = "distillation"
    REQUIRED_SETTINGS = frozenset({"distill", "windows"})

    def has_progress(self) -> bool:
        return any(self.path.glob(f"{RECONSTRUCTED}/*"))


@dataclass(frozen=True, kw_only=True)
class Distilling:
    """A reconstruction that is made in a folder of its own, distilled there, and moved to `out` when all is done.

    `asked` is all that was asked for: a folder that was begun with something else is not gone on with. `naming` is how
    errors name its options.
    """

    out: Path
    teacher: Checkpoint
    data: str | Texts
    options: ReconstructOptions
    asked: Mapping[str, object]
    run: LoadOptions
    force: bool
    reporter: Reporter
    naming: Callable[[], AbstractContextManager[None]] = nullcontext

    def finish(self, make: Callable[[Path, ReconstructOptions], object]) -> ReconstructionRecord:
        """`make` writes the reconstructed model to a folder; returns its record with what the distillation gave."""
        if not self._is_published():
            check_output(self.teacher, self.out, self.force)
        folder, name = self.folder, self.out.name
        settings = {"distill": self.options.distill, "windows": self.windows.digest, **dict(_told(self.asked))}
        run_folder = DistillationFolder(folder)
        with run_folder.open(settings, self.reporter, force=self.force, prepare=lambda: None):
            if self._is_published():  # all that an earlier run had left to do
                return ReconstructionRecord.read(self.out / RECONSTRUCTION)
            rebuilt = folder / RECONSTRUCTED / name
            if not rebuilt.is_dir():
                make(rebuilt, replace(self.options, distill=None))
            return self._distil(rebuilt, folder / DISTILLED / name)

    @property
    def folder(self) -> Path:
        return DistillationFolder.beside(self.out).path

    def _is_published(self) -> bool:
        """Whether the output is the folder that won here, which keeps its number when it is moved."""
        path = self.folder / WINNER
        return path.is_file() and self.out.is_dir() and read_json(path).get("inode") == self.out.stat().st_ino

    @cached_property
    def windows(self) -> Windows:
        """Those of the reconstruction."""
        with self.naming():
            return self.options.windows(load_tokenizer(self.teacher.folder), self.data, self.run.place.type)

    def _distil(self, rebuilt: Path, place: Path) -> ReconstructionRecord:
        student = Checkpoint.open(rebuilt)
        record = ReconstructionRecord.read(rebuilt / RECONSTRUCTION)
        config = {**record.config, "out": str(self.out), "distill": self.options.distill}
        record = replace(record, config=config)
        if place.is_dir():  # an earlier run came as far as this
            trained = RecoveryRecord.read(place / RECOVERY)
        else:
            session = self._session(student, record, place)
            begun_with = {"model": student.fingerprint, "teacher": self.teacher.fingerprint}
            with session.prepared(lambda: student, begun_with, self.reporter) as tokens:
                trained = session.train(Job(student=student, out=place), tokens, reporter=self.reporter)
        steps, nats = self.options.distill, trained.measured.nats
        assert steps is not None
        taken = nats.after < nats.before
        found = Distilled(steps=steps, before=nats.before, after=nats.after, taken=taken)
        record = replace(record, distillation=found, out=str(self.out))
        self.reporter.say(found.line())

        def move() -> None:
            winner = place if taken else rebuilt
            write_text(winner / RECONSTRUCTION, json.dumps(record.to_json(), indent=1) + "\n")
            write_json(self.folder / WINNER, {"inode": winner.stat().st_ino})
            publish(winner, self.out, self.force)

        distributed.from_main(move)
        return record

    def _session(self, student: Checkpoint, made: ReconstructionRecord, place: Path) -> Session[RecoveryRecord]:
        batch = BATCH[self.run.place.type] if self.options.batch is None else self.options.batch
        options = RecoverOptions(
            steps=self.options.distill, batch_size=batch, length=self.options.length, lr=LEARNING_RATE,
            min_lr=LEARNING_RATE / 20, kd_weight=TEACHER, temperature=1.0, mixers=True, seed=self.options.seed,
        )  # fmt: skip
        options.adaptation(student)
        kind = replace(
            RECOVERED,
            label="distilling",
            how_to_continue="the same command continues it",
            record=lambda outcome, model: replace(
                RecoveryRecord(**vars(outcome)), config=made.config, out=str(self.out)
            ),
        )
        trainer = TrainerOptions(report_to="none", resume=TrainingFolder.beside(place).path.is_dir())
        run = RunOptions(device=self.run.device, dtype=self.run.dtype)
        trainer.check(options, run)
        return Session(
            kind=kind, model=student.source, out=place, given={}, text=TrainingText(data=self.data),
            options=options, trainer=trainer, run=run, reading=self._tokens,
            distillation=Distillation(teacher=self.teacher, weight=options.kd_weight, temperature=1.0),
        )  # fmt: skip

    def _tokens(
        self, text: TrainingText, options: TrainOptions, tokenizer: Any, folder: Path, reporter: Reporter
    ) -> Tokens:
        """The windows of the reconstruction, those that it held out apart."""
        if Corpus.lies_in(folder):
            corpus = Corpus.open(folder)
        else:
            apart = held_out_of(len(self.windows.tokens))
            held_out, training = self.windows.tokens[:apart], self.windows.tokens[apart:]
            corpus = Corpus.of_windows(training, held_out, str(text.data), self.options.documents, folder)
        unseen = corpus.held_out_windows
        size = TextSize.of(tokenizer, unseen, apart=True)
        return Tokens(
            corpus=corpus, held_out=unseen, size=size, measured_on=f"windows of {text.data} that were not trained on"
        )


def _told(asked: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """What was asked for, option by option."""
    for name, value in asked.items():
        if is_dataclass(value) and not isinstance(value, type):
            inner = {f"{name}.{field.name}": getattr(value, field.name) for field in fields(value)}
            yield from _told(inner)
        else:
            yield name, str(value)
