"""One training from its checks to its record: a recovery, its control, a distillation or a pre-training.

They differ by values: the model, the options, whether there is a teacher, and the `Kind` of the result. What a training
needs to continue after an interruption lies in a run folder beside its output folder.
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
from slimstate.checkpoints.safetensors_io import Replacement
from slimstate.checkpoints.writer import ADAPTER, CARD, LOGS, check_apart, write_checkpoint
from slimstate.core.file_names import CONFIG
from slimstate.data.corpus import Schedule
from slimstate.families import loader_of
from slimstate.families.contract import Config
from slimstate.models.load import load, load_tokenizer
from slimstate.models.prepare import describe_kernels
from slimstate.models.speed import EFFICIENCY, WITH_GRADIENT, measure_speed
from slimstate.models.stock import as_published
from slimstate.records.base import versions
from slimstate.records.folder import check_model_folder
from slimstate.records.parts import Text
from slimstate.records.provenance import config_file
from slimstate.records.schema import from_json, to_json
from slimstate.records.training import LogEntry, Measurements, Teacher, TrainingRunRecord, TrainSettings
from slimstate.system import distributed
from slimstate.system.atomic import check_place
from slimstate.system.progress import SILENT, Reporter
from slimstate.training.adaptation import Adaptation, adaptation_of, trainable
from slimstate.training.measure import measure
from slimstate.training.options import TrainOptions
from slimstate.training.run_checkpoints import MODEL, TrainingFolder, step_of
from slimstate.training.teacher import Distillation
from slimstate.training.tokens import Tokens, read_tokens

R = TypeVar("R", bound=TrainingRunRecord)


@dataclass(frozen=True, kw_only=True)
class Kind(Generic[R]):
    """What a training is called in the progress, and how its record and its model card are made."""

    label: str
    record: Callable[[TrainingRunRecord, Checkpoint], R]
    card: Callable[[R, Config, str], str]
    how_to_continue: str = "`resume` continues it"  # after an interruption


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to train, its output folder, and the part of the run folder that its checkpoints go to."""

    student: Checkpoint
    out: Path
    part: str = MODEL
    source: str | None = None  # what the record calls the model, where that is not its folder


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The trained parameters, and what the record says about the training."""

    parameters: Mapping[str, Tensor]
    size: int
    log: tuple[LogEntry, ...]
    epochs: float
    kernels: str
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class Session(Generic[R]):
    """What the trainings of one command share.

    `provenance` is the config of the run, which lies beside the weights; `notes` are added to the model card.
    `read_tokens` returns the windows of the text.
    """

    kind: Kind[R]
    out: Path
    options: TrainOptions
    provenance: Mapping[str, Any]
    distillation: Distillation | None = None
    notes: Callable[[Config], str] = lambda config: ""
    read_tokens: Callable[[TrainOptions, Any, Path, Reporter], Tokens] = read_tokens
    reporter: Reporter = SILENT

    @property
    def run_folder(self) -> TrainingFolder:
        return replace(TrainingFolder.beside(self.out), how_to_continue=self.kind.how_to_continue)

    def check(self, sources: Sequence[Checkpoint], outs: Sequence[Path]) -> None:
        """Check that the training can run here and that every folder can be written, before any work is done."""
        self.options.check_environment()
        check_place(self.run_folder.path, folder=True)
        for out in outs:
            for source in sources:
                check_apart(source, out)
            check_model_folder(out, self.options.trainer.force)

    def open(
        self, student: Callable[[], Checkpoint], identity: Mapping[str, object],
        accept: Callable[[Tokens], object] = lambda tokens: None,
    ) -> AbstractContextManager[Tokens]:  # fmt: skip
        """Open the run folder and yield the tokens of the training.

        `identity` and the options must be those of an earlier run for it to be continued. `student` is called once;
        `accept` raises where the tokens do not fit earlier results.
        """
        text, trainer = self.options.text, self.options.trainer
        eval_text = None if text.eval_text is None else str(text.eval_text)
        sources = {"data": str(text.data), "eval_text": eval_text, "documents": text.documents}
        settings = {**self.options.settings(), **identity, **sources}

        def prepare() -> Tokens:
            tokenizer = load_tokenizer(student().folder)
            tokens = self.read_tokens(self.options, tokenizer, self.run_folder.path, self.reporter)
            accept(tokens)
            return tokens

        return self.run_folder.open(
            settings, self.reporter, force=trainer.force, resume=trainer.resume, prepare=prepare
        )

    def train(self, job: Job, tokens: Tokens, control: R | None = None) -> R:
        """Train a model, merge its adapters, write it, and return the record.

        `control` is the record of the uncut model that had the same training.
        """
        started = time.perf_counter()
        adaptation = adaptation_of(self.options, job.student)
        result = self._fit(job, adaptation, tokens)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

        def conclude() -> R:
            with self.reporter.waiting("merging"):
                weights = self._merge(job, adaptation, result)
            teacher = None if self.distillation is None else self.distillation.teacher
            nats = None if control is None else control.measured.nats
            measured = measure(job.student, weights, tokens, self.options.run, teacher, nats, self.reporter)
            outcome = self._outcome(job, adaptation, tokens, result, measured)
            record = self.kind.record(replace(outcome, seconds=time.perf_counter() - started), job.student)
            self._write(job, record, job.student.in_files(weights))
            return record

        return distributed.from_main(conclude)

    def _fit(self, job: Job, adaptation: Adaptation, tokens: Tokens) -> FitResult:
        from slimstate.training import trainer

        options, run, student, seed = self.options, self.options.run, job.student, self.options.text.seed
        learner = self._student(student, adaptation, tokens)
        schedule = Schedule(tokens.corpus, options.samples, seed)
        size = sum(parameter.numel() for parameter in trainable(learner).values())
        kernels = describe_kernels(run.place, run.precision, student.family.library)
        self.reporter.say(f"kernels: {kernels}")
        self.reporter.say(
            f"training {size:,} parameters for {options.total_steps:,} steps of {options.batch_size} x"
            f" {options.length} tokens: {options.total_tokens:,} tokens, {schedule.epochs:.2f} epochs,"
            f" about {timedelta(seconds=round(self._estimate_seconds(student)))}, up to a factor of two"
        )
        folder = self.run_folder.path / job.part
        resume = trainer.resume_from(folder)
        if resume is not None:
            self.reporter.say(f"continuing from {resume}")
        started = time.perf_counter()
        arguments = trainer.arguments(options, folder)
        with self.reporter.meter(self.kind.label, options.total_steps) as advance:
            watch = trainer.Watch(options.tokens_per_step, options.trainer.grad_accum, advance)
            parameters, log = trainer.fit(learner, schedule, arguments, watch, resume)
        steps = options.total_steps - (0 if resume is None else step_of(resume))
        speed = steps * options.tokens_per_step / (time.perf_counter() - started) if steps else None
        return FitResult(
            parameters=parameters, size=size, log=log, epochs=schedule.epochs, kernels=kernels, tokens_per_second=speed
        )

    def _student(self, student: Checkpoint, adaptation: Adaptation, tokens: Tokens) -> Any:
        """Return the model with its teacher, both loaded."""
        from slimstate.training.trainer import Student

        run, distillation = self.options.run, self.distillation
        teacher = None if distillation is None else distillation.load(tokens.corpus, run, self.reporter)
        with self.reporter.waiting("loading the model"):
            precision = run.precision_name if adaptation.has_adapters else "float32"
            runtime = load(student.folder, device=run.place.type, dtype=precision)
        torch.manual_seed(self.options.text.seed)
        temperature, weight = (1.0, 0.0) if distillation is None else (distillation.temperature, distillation.weight)
        return Student(adaptation.attach(runtime.model), teacher, temperature, weight)

    def _estimate_seconds(self, student: Checkpoint) -> float:
        run, passes = self.options.run, WITH_GRADIENT + (self.distillation is not None)
        speed = measure_speed(student, run.place, run.precision).flops_per_second * EFFICIENCY[run.place.type]
        return passes * 2 * student.parameters * self.options.total_tokens / speed / distributed.count()

    def _merge(self, job: Job, adaptation: Adaptation, result: FitResult) -> dict[str, Tensor]:
        store = self.options.adaptation.keep_adapter and adaptation.has_adapters
        model = load(job.student.folder, device="cpu", dtype="float32").model
        folder = self.run_folder.path / job.part / ADAPTER if store else None
        return adaptation.merge(model, result.parameters, folder)

    def _outcome(
        self, job: Job, adaptation: Adaptation, tokens: Tokens, result: FitResult, measured: Measurements
    ) -> TrainingRunRecord:
        student, settings = job.student, {**self.options.settings(), "adaptation": to_json(adaptation.describe())}
        teacher = None if self.distillation is None else self.distillation.teacher
        model = replace(
            identity(student, job.out.name),
            model=student.source if job.source is None else job.source,
            loader=loader_of(student.family.model_type),
        )
        return TrainingRunRecord(
            **vars(model),
            config=self.provenance,
            versions=versions(),
            kernels=result.kernels,
            seed=self.options.text.seed,
            teacher=None if teacher is None else Teacher(model=teacher.source, fingerprint=teacher.fingerprint),
            settings=from_json(TrainSettings, settings),
            corpus=from_json(Text, tokens.corpus.describe()),
            tokens=self.options.total_tokens,
            measured=measured,
            epochs=result.epochs,
            trained_parameters=result.size,
            tokens_per_second=result.tokens_per_second,
            log=result.log,
            processes=distributed.count(),
            out=str(job.out),
        )

    def _write(self, job: Job, record: R, weights: Mapping[str, Tensor]) -> None:
        """Write a plain checkpoint with its record, config and card, the logs of the Trainer, and the adapter."""
        config = record.config_after(as_published(job.student.config))
        documents = {
            record.FILE: json.dumps(record.to_json(), indent=1) + "\n",
            CONFIG: config_file(self.provenance),
            CARD: self.kind.card(record, config, job.out.name) + self.notes(config),
        }
        folders = {name: self.run_folder.path / job.part / name for name in (ADAPTER, LOGS)}
        write_checkpoint(
            job.student,
            Replacement(weights),
            config,
            documents,
            job.out,
            folders={name: folder for name, folder in folders.items() if folder.is_dir()},
            force=self.options.trainer.force,
            reporter=self.reporter,
        )
