"""One training from its checks to its record: a recovery, its control, a distillation or a pre-training.

They differ by values: the model, the options, whether there is a teacher, and the `Kind` of the result. What a training
needs to continue after an interruption lies in a run folder beside its output folder.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from slimstate.checkpoints.model_card import recovery_card, training_card
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import Replacement
from slimstate.checkpoints.writer import ADAPTER, CARD, LOGS, check_apart, new_checkpoint
from slimstate.data.corpus import Schedule
from slimstate.evaluation.associative_recall import recall_tokens
from slimstate.families.contract import Config
from slimstate.models.load import load, load_tokenizer
from slimstate.models.memory import DeviceMemory
from slimstate.models.prepare import describe_kernels
from slimstate.models.speed import WITH_GRADIENT
from slimstate.models.stock import as_published
from slimstate.records.base import versions
from slimstate.records.folder import check_model_folder
from slimstate.records.numbers import epochs_text, plural
from slimstate.records.parts import Text
from slimstate.records.schema import from_json, to_json
from slimstate.records.training import RecoveryRecord, Teacher, TrainingRecord, TrainingRunRecord, TrainSettings
from slimstate.system import distributed
from slimstate.system.atomic import check_place
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.value import Value
from slimstate.training.adaptation import Adaptation, adaptation_of, trainable
from slimstate.training.options import TrainOptions
from slimstate.training.progress import TrainingProgress
from slimstate.training.run_checkpoints import MODEL, TrainingFolder, step_of
from slimstate.training.teacher import Distillation
from slimstate.training.tokens import Tokens, measure, read_tokens

R = TypeVar("R", bound=TrainingRunRecord)


class Kind(Value, Generic[R]):
    """What a training is called in the progress, its record and model card, and what the record says of the student."""

    label: str
    record: type[R]
    card: Callable[[R, Config, str], str]
    facts: Callable[[Checkpoint], Mapping[str, object]] = lambda student: {}
    how_to_continue: str = "`resume` continues it"  # after an interruption


RECOVERY_KIND = Kind(label="recovering", record=RecoveryRecord, card=recovery_card)
TRAINING_KIND = Kind(
    label="training", record=TrainingRecord, card=training_card,
    facts=lambda student: {"parameters": student.parameters, "shared_filters": student.mixers[0].sharing},
)  # fmt: skip


class Job(Value):
    """A model to train, its output folder, and the part of the run folder that its checkpoints go to."""

    student: Checkpoint
    out: Path
    part: str = MODEL
    source: str | None = None  # what the record calls the model, where that is not its folder


class Session(Value, Generic[R]):
    """What the trainings of one command share.

    `provenance` is the config of the run, which lies beside the weights; `notes` are added to the model card.
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

    @property
    def teacher(self) -> Checkpoint | None:
        return None if self.distillation is None else self.distillation.teacher

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

        An earlier run continues if its `identity` and options were the same. `student` is called once; `accept` raises
        where the tokens do not fit earlier results.
        """
        text, trainer = self.options.text, self.options.trainer
        eval_text = None if text.eval_text is None else str(text.eval_text)
        sources = {"data": str(text.data), "eval_text": eval_text, "documents": text.documents}
        sources |= {"special_tokens": text.special_tokens}

        def prepare() -> Tokens:
            tokenizer = load_tokenizer(student().folder)
            tokens = self.read_tokens(self.options, tokenizer, self.run_folder.path, self.reporter)
            accept(tokens)
            return tokens

        return self.run_folder.open(
            {**self.options.settings(), **identity, **sources}, self.reporter,
            force=trainer.force, resume=trainer.resume, prepare=prepare,
        )  # fmt: skip

    def run_training(self, job: Job, tokens: Tokens, control: R | None = None) -> R:
        """Train a model, merge its adapters, write it, and return the record.

        `control` is the record of the uncut model that had the same training.
        """
        started = time.perf_counter()
        adaptation = adaptation_of(self.options, job.student)
        with self.reporter.then("the measurement", self._measuring_tokens(tokens, control)):
            parameters, facts = self._fit(job, adaptation, tokens)
        DeviceMemory(self.options.run.place).release()

        def conclude() -> R:
            with self.reporter.waiting("merging"):
                store = self.options.adaptation.keep_adapter and adaptation.has_adapters
                model = load(job.student.folder, device="cpu", dtype="float32").model
                folder = self.run_folder.path / job.part / ADAPTER if store else None
                weights = adaptation.merge(model, parameters, folder)
            compared, run = None if control is None else control.measured, self.options.run
            facts["measured"] = measure(job.student, weights, tokens, run, self.teacher, compared, self.reporter)
            facts["seconds"] = time.perf_counter() - started
            record = self._describe(job, adaptation, tokens, facts)
            self._write(job, record, job.student.in_files(weights))
            return record

        return distributed.from_main(conclude)

    @property
    def _step_tokens(self) -> float:
        """The cost of a step, in tokens once forward through the model."""
        teacher = self.distillation
        passes = teacher is not None and teacher.weight > 0 and teacher.cache is None
        return (WITH_GRADIENT + passes) * self.options.tokens_per_step

    @property
    def training_tokens(self) -> float:
        return self.options.total_steps * self._step_tokens

    def _measuring_tokens(self, tokens: Tokens, control: R | None) -> int:
        """Return the cost of the measures before and after, and of those of the uncut model."""
        models, count = 2 + (self.teacher is not None and control is None), tokens.held_out.numel()
        return models * (count + recall_tokens() * (count >= recall_tokens()))

    def _fit(self, job: Job, adaptation: Adaptation, tokens: Tokens) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the trained parameters, and what the record says about the training."""
        from slimstate.training import trainer

        options, run, say = self.options, self.options.run, self.reporter.say
        with self.reporter.then("the training", self.training_tokens):
            student = self._load_student(job.student, adaptation, tokens)
        schedule = Schedule(tokens.corpus, options.samples, options.text.seed)
        size = sum(parameter.numel() for parameter in trainable(student).values())
        kernels = describe_kernels(run.place, run.precision, job.student.family.library)
        say(f"kernels: {kernels}")
        say(
            f"training {size:,} parameters for {plural(options.total_steps, 'step')} of {options.batch_size} x"
            f" {options.length} tokens: {options.total_tokens:,} tokens, {epochs_text(schedule.epochs)}"
        )
        folder = self.run_folder.path / job.part
        checkpoint = trainer.resume_from(folder)
        if checkpoint is not None:
            say(f"continuing from {checkpoint}")
        started = time.perf_counter()
        with self.reporter.meter(self.kind.label, options.total_steps, tokens=self._step_tokens) as update:
            progress = TrainingProgress(options, update, self.reporter)
            parameters, log = trainer.fit(student, schedule, options, folder, checkpoint, progress)
        steps = options.total_steps - (0 if checkpoint is None else step_of(checkpoint))
        speed = steps * options.tokens_per_step / (time.perf_counter() - started) if steps else None
        return parameters, {
            "trained_parameters": size, "log": log, "epochs": schedule.epochs, "kernels": kernels,
            "tokens_per_second": speed,
        }  # fmt: skip

    def _load_student(self, student: Checkpoint, adaptation: Adaptation, tokens: Tokens) -> Any:
        """Return the model with its teacher as one module."""
        from slimstate.training.trainer import Student

        run, distillation = self.options.run, self.distillation
        teacher = None if distillation is None else distillation.load(tokens.corpus, run, self.reporter)
        with self.reporter.waiting("loading the model"):
            precision = run.precision_name if adaptation.has_adapters else "float32"
            runtime = load(student.folder, device=run.place.type, dtype=precision)
        torch.manual_seed(self.options.text.seed)
        temperature, weight = (1.0, 0.0) if distillation is None else (distillation.temperature, distillation.weight)
        return Student(adaptation.attach(runtime.model), teacher, temperature, weight)

    def _describe(self, job: Job, adaptation: Adaptation, tokens: Tokens, facts: Mapping[str, Any]) -> R:
        student, teacher, options = job.student, self.teacher, self.options
        settings = {**options.settings(), "adaptation": to_json(adaptation.describe())}
        source = student.source if job.source is None else job.source
        return self.kind.record(
            **vars(replace(student.identity(job.out.name), model=source, loader=student.family.loader)),
            **{"out": str(job.out), **facts, **self.kind.facts(student)},
            config=self.provenance,
            versions=versions(),
            seed=options.text.seed,
            teacher=None if teacher is None else Teacher(model=teacher.source, fingerprint=teacher.fingerprint),
            settings=from_json(TrainSettings, settings),
            corpus=from_json(Text, tokens.corpus.describe()),
            tokens=options.total_tokens,
            processes=distributed.count(),
        )

    def _write(self, job: Job, record: R, weights: Mapping[str, Tensor]) -> None:
        """Write a plain checkpoint with its record, config and card, the logs of the Trainer, and the adapter."""
        config = record.config_after(as_published(job.student.config))
        card = self.kind.card(record, config, job.out.name) + self.notes(config)
        folders = {name: self.run_folder.path / job.part / name for name in (ADAPTER, LOGS)}
        existing = {name: folder for name, folder in folders.items() if folder.is_dir()}
        change = Replacement(weights)
        with new_checkpoint(job.student, change, job.out, force=self.options.trainer.force) as writer:
            writer.finish(change, config, {**record.files(), CARD: card, **existing}, reporter=self.reporter)
