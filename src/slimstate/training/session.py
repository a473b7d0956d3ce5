"""One training from its checks to its record: a recovery, its control, or a pre-training.

They differ by values: the model that is trained, the options, whether there is a teacher, and the `Kind` of what comes
out. What a training needs to go on after any interruption lies in a run folder beside the folder it will become.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from slimstate.checkpoints.identity import identity
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import DTYPES, Replacement
from slimstate.checkpoints.writer import ADAPTER, CARD, LOGS, check_apart, write_checkpoint
from slimstate.data.corpus import Schedule
from slimstate.evaluation.perplexity import mean_nats, perplexity_of
from slimstate.families import loader_of
from slimstate.families.contract import Config
from slimstate.models.load import Runtime, load, load_tokenizer
from slimstate.models.options import RunOptions
from slimstate.models.prepare import describe_kernels
from slimstate.models.stock import as_published
from slimstate.pruning.estimate import training_seconds
from slimstate.records.base import versions
from slimstate.records.ownership import check_model_folder
from slimstate.records.parts import Text
from slimstate.records.provenance import non_defaults, run_config
from slimstate.records.schema import from_json, to_json
from slimstate.records.training import (
    LogEntry,
    Measurements,
    Nats,
    Teacher,
    TrainingRunRecord,
    TrainSettings,
)
from slimstate.system import distributed
from slimstate.system.atomic import check_place
from slimstate.system.progress import SILENT, Reporter
from slimstate.training.lora import Adaptation, trainable
from slimstate.training.options import ONLY_ONCE, TrainerOptions, TrainingText, TrainOptions
from slimstate.training.run_checkpoints import MODEL, TrainingFolder, step_of
from slimstate.training.teacher import Distillation
from slimstate.training.tokens import Tokens, read_tokens

R = TypeVar("R", bound=TrainingRunRecord)
LEAST_GAP = 0.01  # nats per token; shares of less than that say nothing


@dataclass(frozen=True, kw_only=True)
class Kind(Generic[R]):
    """A verb that trains, and what comes out of it: its record, the settings in it, and the card of the model."""

    verb: str
    label: str  # of the progress
    input: str = "model"  # the name of the command's argument
    settings: type[TrainSettings]
    record: Callable[[TrainingRunRecord, Checkpoint], R]
    card: Callable[[R, Config, str], str]
    how_to_continue: str = "`resume` continues it"  # after a stop


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to train, the folder it goes to, and the name it has in the run folder and in the record."""

    student: Checkpoint
    out: Path
    part: str = MODEL
    source: str | None = None  # what the record says it was made from, where that is not the student

    @property
    def model(self) -> str:
        return self.student.source if self.source is None else self.source


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The trained parameters, and what there is to say about how they came about."""

    parameters: Mapping[str, Tensor]
    size: int
    log: tuple[LogEntry, ...]
    epochs: float
    kernels: str
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class Session(Generic[R]):
    """What the trainings of one command share: every option, and who teaches.

    `model` and `given` are the argument of the command and those of its options that are in none of the values;
    `reading` makes tokens of the text.
    """

    kind: Kind[R]
    model: str
    out: Path
    given: Mapping[str, object]
    text: TrainingText
    options: TrainOptions
    trainer: TrainerOptions
    run: RunOptions
    distillation: Distillation | None = None
    reading: Callable[[TrainingText, TrainOptions, Any, Path, Reporter], Tokens] = read_tokens

    @property
    def config(self) -> dict[str, Any]:
        """Return the config that repeats the training."""
        values = (self.text, self.options, self.trainer, self.run)
        options = {"out": self.out, **self.given, **dict(non_defaults(*values, exclude=ONLY_ONCE))}
        return run_config(self.kind.verb, {self.kind.input: self.model}, options)

    @property
    def run_folder(self) -> TrainingFolder:
        return replace(TrainingFolder.beside(self.out), how_to_continue=self.kind.how_to_continue)

    @property
    def folder(self) -> Path:
        """The path of the run folder."""
        return self.run_folder.path

    def check(self, sources: Sequence[Checkpoint], outs: Sequence[Path]) -> None:
        """It can be run here, and every folder that will be written can be, before the work that would be lost."""
        self.trainer.check(self.options, self.run)
        check_place(self.folder, folder=True)
        for out in outs:
            for source in sources:
                check_apart(source, out)
            check_model_folder(out, self.trainer.force)

    def prepared(
        self,
        student: Callable[[], Checkpoint],
        begun_with: Mapping[str, object],
        reporter: Reporter,
        accept: Callable[[Tokens], object] = lambda tokens: None,
    ) -> AbstractContextManager[Tokens]:
        """Open the run folder and yield the tokens of the training.

        `student` is called there, once; `accept` raises where the tokens do not fit what was made before.
        """
        measured_on = None if self.text.eval_text is None else str(self.text.eval_text)
        text = {"data": str(self.text.data), "eval_text": measured_on, "documents": self.text.documents}
        settings = {**self.options.settings(self.run), **begun_with, **text}

        def read() -> Tokens:
            tokenizer = load_tokenizer(student().folder)
            tokens = self.reading(self.text, self.options, tokenizer, self.folder, reporter)
            accept(tokens)
            return tokens

        trainer = self.trainer
        return self.run_folder.open(settings, reporter, force=trainer.force, resume=trainer.resume, prepare=read)

    def train(self, job: Job, tokens: Tokens, *, control: R | None = None, reporter: Reporter = SILENT) -> R:
        """Train a model, merge what it learnt, and write it; returns the record.

        `control` is the record of the uncut model that had the same training.
        """
        started = time.perf_counter()
        adaptation = self.options.adaptation(job.student)
        learned = self._learn(job, adaptation, tokens, reporter)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

        def conclude() -> R:
            with reporter.waiting("merging"):
                merged = self._merged(job, adaptation, learned)
            measured = self._measure(job.student, tokens, merged, control, reporter)
            outcome = self._outcome(job, adaptation, tokens, learned, measured, time.perf_counter() - started)
            record = self.kind.record(outcome, job.student)
            self._write(job, record, job.student.in_files(merged), reporter)
            return record

        return distributed.from_main(conclude)

    def _learn(self, job: Job, adaptation: Adaptation, tokens: Tokens, reporter: Reporter) -> Learned:
        from slimstate.training import trainer

        options, run, student = self.options, self.run, job.student
        teaching = self.distillation
        teacher = None if teaching is None else teaching.prepared(tokens.corpus, run, reporter)
        with reporter.waiting("loading the model"):
            precision = run.precision_name if adaptation.adapted else "float32"
            runtime = load(student.folder, device=run.place.type, dtype=precision)
        torch.manual_seed(options.seed)
        temperature, weight = (1.0, 0.0) if teaching is None else (teaching.temperature, teaching.weight)
        learner = trainer.Student(adaptation.attach(runtime.model), teacher, temperature, weight)
        schedule = Schedule(tokens.corpus, options.samples, options.seed)
        size = sum(parameter.numel() for parameter in trainable(learner).values())
        kernels = describe_kernels(run.place, run.precision, student.family.library)
        reporter.say(f"kernels: {kernels}")
        seconds = training_seconds(student, options.total_tokens, run, taught=teaching is not None)
        reporter.say(
            f"training {size:,} parameters for {options.total_steps:,} steps of {options.batch_size} x"
            f" {options.length} tokens: {options.total_tokens:,} tokens, {schedule.epochs:.2f} epochs,"
            f" about {timedelta(seconds=round(seconds / distributed.count()))}, give or take a factor of two"
        )
        folder = self.folder / job.part
        resume = trainer.resume_from(folder)
        if resume is not None:
            reporter.say(f"going on from {resume}")
        begun_at = time.perf_counter()
        parameters, log = trainer.fit(
            learner,
            schedule,
            trainer.arguments(options, self.trainer, run, folder),
            tokens_per_step=options.tokens_per_step,
            label=self.kind.label,
            resume=resume,
            reporter=reporter,
        )
        done = options.total_steps - (0 if resume is None else step_of(resume))
        speed = done * options.tokens_per_step / (time.perf_counter() - begun_at) if done else None
        return Learned(
            parameters=parameters, size=size, log=log, epochs=schedule.epochs, kernels=kernels, tokens_per_second=speed
        )

    def _merged(self, job: Job, adaptation: Adaptation, learned: Learned) -> dict[str, Tensor]:
        keep = self.folder / job.part / ADAPTER if self.trainer.keep_adapter and adaptation.adapted else None
        model = load(job.student.folder, device="cpu", dtype="float32").model
        return adaptation.merged(model, learned.parameters, keep)

    def _measure(
        self,
        student: Checkpoint,
        tokens: Tokens,
        merged: Mapping[str, Tensor],
        control: R | None,
        reporter: Reporter,
    ) -> Measurements:
        """Mean nats of the student before and after, and of the uncut model, on tokens that were held out."""

        def nats_of(runtime: Runtime, what: str) -> float:
            return mean_nats(runtime, tokens.held_out, reporter, f"measuring {what}")

        def loaded(checkpoint: Checkpoint) -> Runtime:
            return load(checkpoint.folder, device=self.run.device, dtype=self.run.precision_name)

        runtime = loaded(student)
        before = nats_of(runtime, "before")
        as_written = {
            name: tensor.to(DTYPES[student.tensors[stored[0]].dtype])
            for name, tensor in merged.items()
            if (stored := student.stored_names(name))
        }
        runtime.model.load_state_dict(as_written, strict=False)
        after = nats_of(runtime, "after")
        teacher = None if self.distillation is None else self.distillation.teacher
        if control is not None:  # it was the uncut model, measured on the same tokens
            theirs = control.measured.nats
            nats = Nats(before=before, after=after, uncut=theirs.before, control=theirs.after)
        elif teacher is not None and teacher.fingerprint != student.fingerprint:
            nats = Nats(before=before, after=after, uncut=nats_of(loaded(teacher), "the uncut model"))
        else:
            nats = Nats(before=before, after=after)
        return measured_as(nats, tokens)

    def _outcome(
        self,
        job: Job,
        adaptation: Adaptation,
        tokens: Tokens,
        learned: Learned,
        measured: Measurements,
        seconds: float,
    ) -> TrainingRunRecord:
        student = job.student
        teacher = None if self.distillation is None else self.distillation.teacher
        settings = {**self.options.settings(self.run), "adaptation": to_json(adaptation.describe())}
        return TrainingRunRecord(
            **{
                **vars(identity(student, job.out.name)),
                "model": job.model,
                "loader": loader_of(student.family.model_type),
            },
            config=self.config,
            versions=versions(),
            kernels=learned.kernels,
            seed=self.options.seed,
            seconds=seconds,
            teacher=None if teacher is None else Teacher(model=teacher.source, fingerprint=teacher.fingerprint),
            settings=from_json(self.kind.settings, settings),
            corpus=from_json(Text, tokens.corpus.describe()),
            tokens=self.options.total_tokens,
            measured=measured,
            epochs=learned.epochs,
            trained_parameters=learned.size,
            tokens_per_second=learned.tokens_per_second,
            log=learned.log,
            processes=distributed.count(),
            out=str(job.out),
        )

    def _write(self, job: Job, record: R, changed: Mapping[str, Tensor], reporter: Reporter) -> None:
        """The plain checkpoint with its record and card; the training's logs and its adapter go with it."""
        config = record.config_after(as_published(job.student.config))
        documents = {
            record.FILE: json.dumps(record.to_json(), indent=1) + "\n",
            CARD: self.kind.card(record, config, job.out.name),
        }
        places = {name: self.folder / job.part / name for name in (ADAPTER, LOGS)}
        write_checkpoint(
            job.student,
            Replacement(changed),
            config,
            documents,
            job.out,
            folders={name: place for name, place in places.items() if place.is_dir()},
            force=self.trainer.force,
            reporter=reporter,
        )


def measured_as(nats: Nats, tokens: Tokens) -> Measurements:
    known, size = nats.known(), tokens.size
    in_units = {name: size.predicted(value) for name, value in known.items()}
    return Measurements(
        text=tokens.measured_on,
        tokens=size.tokens,
        words=size.words,
        bytes=size.bytes,
        nats=nats,
        perplexity={name: perplexity_of(value) for name, value in known.items()},
        word_perplexity={name: found.word_perplexity for name, found in in_units.items()},
        bits_per_byte={name: found.bits_per_byte for name, found in in_units.items()},
        closed={goal: share_closed(nats, known[goal]) for goal in ("uncut", "control") if goal in known},
    )


def share_closed(nats: Nats, goal: float) -> float | None:
    """How much of the gap in nats between the cut model and `goal` the recovery closed; None of a gap too small."""
    gap = nats.before - goal
    return (nats.before - nats.after) / gap if gap > LEAST_GAP else None
