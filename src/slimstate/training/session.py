"""One model trained and written: its parts that learn, the teacher's opinion, the course, the merge, the numbers.

Recoveries and pre-trainings are both this; an `Ending` says what is made of the result.

What a training needs to go on after any interruption lies in a workplace beside the folder it will become.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from slimstate.checkpoints.model_card import write_recovery_card
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import DTYPES, Replacement
from slimstate.checkpoints.writer import ADAPTER, CARD, LOGS, write_checkpoint
from slimstate.data.corpus import Corpus, Schedule
from slimstate.evaluation.perplexity import mean_nats, perplexity_of
from slimstate.families import loader_of
from slimstate.models.devices import pick_device, pick_dtype
from slimstate.models.load import Runtime, load
from slimstate.models.prepare import describe_kernels
from slimstate.records.base import versions
from slimstate.records.training import RECOVERY
from slimstate.system import distributed
from slimstate.system.errors import PlanError
from slimstate.system.json_files import plain
from slimstate.system.progress import SILENT, Reporter
from slimstate.training.lora import Adaptation, trainable
from slimstate.training.teacher import PresentTeacher, Teacher, TeacherCache

if TYPE_CHECKING:
    from slimstate.training.trainer import Course

LEAST_GAP = 0.01  # nats per token; shares of less than that say nothing


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides what a recovery gives. The defaults are the paper's, where it says."""

    WAY_OUT: ClassVar[str] = "leave out --full, and choose --lora-targets without it"

    steps: int = 2000
    batch_size: int = 16
    length: int = 2048
    lr: float = 1e-4
    min_lr: float = 1e-5
    warm_up: float = 0.05
    kd_weight: float = 1.0
    temperature: float = 2.0
    full: bool = False
    lora_targets: str | None = None
    lora_rank: int = 16
    lora_alpha: int = 32
    top_k: int | None = None
    seed: int = 0
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("steps", self.steps, 1),
            ("batch-size", self.batch_size, 1),
            ("length", self.length, 2),
            ("cache-top-k", self.top_k, 1),
        ):
            if value is not None and value < least:
                raise PlanError(f"--{name} {value}: it must be at least {least}")
        if not 0 < self.lr < math.inf or not 0 <= self.min_lr <= self.lr:
            raise PlanError(f"a learning rate from {self.lr:g} to {self.min_lr:g}: it must fall, and end at 0 or above")
        if self.dtype == "float16":
            raise PlanError("--dtype float16 cannot be trained in without losing gradients: use bfloat16 or float32")
        if not 0 <= self.warm_up < 1:
            raise PlanError(f"--warm-up {self.warm_up:g}: it is a share of the steps, from 0 to less than 1")
        if not 0 < self.temperature < math.inf or not 0 <= self.kd_weight < math.inf:
            raise PlanError(
                f"--temperature {self.temperature:g} must be positive, --kd-weight {self.kd_weight:g} not negative"
            )

    def described(self) -> dict[str, Any]:
        """What a record tells of them, and what an unfinished training must have been begun with."""
        return dict(vars(self))

    def optimizer(self) -> tuple[float, float]:
        """AdamW's second beta and its weight decay."""
        return 0.999, 0.0

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_size * self.length

    def adaptation(self, student: Checkpoint) -> Adaptation:
        """What is trained; all of it can be written back into files like the student's."""
        adaptation = Adaptation.of(
            student.config,
            student.mixers,
            self.lora_targets,
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            full=self.full,
        )
        for name in adaptation.weights(student.config):
            if not student.stored_names(name):
                raise PlanError(
                    f"{name} is kept in another form in the files of {student.family.model_type} models, and cannot be"
                    f" trained: {self.WAY_OUT}"
                )
        return adaptation


@dataclass(frozen=True, kw_only=True)
class Means:
    """What changes how a recovery is run, and not what it gives."""

    device: str | None = None
    grad_accum: int = 1
    save_every: int | None = None
    report_to: tuple[str, ...] = ("tensorboard",)
    fsdp: bool = False
    keep_adapter: bool = False
    force: bool = False

    def course(self, settings: Settings) -> Course:
        from slimstate.training.trainer import Course

        pieces = self.grad_accum * distributed.count()
        if self.grad_accum < 1 or settings.batch_size % pieces:
            raise PlanError(
                f"--batch-size {settings.batch_size} cannot be split evenly over {distributed.count()} processes"
                f" with --grad-accum {self.grad_accum}"
            )
        if self.fsdp and not (distributed.launched() and pick_device(self.device).type == "cuda"):
            raise PlanError("--fsdp shards a model over GPUs: start one process for each with torchrun")
        if self.save_every is not None and self.save_every < 1:
            raise PlanError(f"--save-every {self.save_every}: it must be at least 1")
        second_beta, weight_decay = settings.optimizer()
        return Course(
            second_beta=second_beta,
            weight_decay=weight_decay,
            steps=settings.steps,
            batch=settings.batch_size,
            pieces=self.grad_accum,
            learning_rate=settings.lr,
            least_rate=settings.min_lr,
            warm_up=settings.warm_up,
            seed=settings.seed,
            save_every=min(self.save_every or max(1, settings.steps // 20), settings.steps),
        )


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What a student is given: the settings, the tokens, what to measure on, and the teacher, if there is one."""

    settings: Settings
    means: Means
    corpus: Corpus
    held_out: Tensor
    measured_on: str
    teacher: Checkpoint | None
    cache: TeacherCache | None


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What a training ends in: the kind and the file of its record, the config and the card of the model."""

    kind: str
    label: str
    record: str
    config: Callable[[Checkpoint, Mapping[str, Any]], dict[str, Any]]
    card: Callable[[Mapping[str, Any], Mapping[str, Any], str], str]


def heal(
    student: Checkpoint,
    lesson: Lesson,
    out: Path,
    work: Path,
    about: Mapping[str, Any],
    *,
    control: Mapping[str, Any] | None = None,
    ending: Ending | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Train a student, merge what it learnt, and write it to `out`; returns the record.

    `control` is the record of the uncut model that had the same training; without an `ending` this is a recovery.
    """
    ending = ending or RECOVERED
    started = time.perf_counter()
    adaptation = lesson.settings.adaptation(student)
    trained, facts = _train(student, lesson, adaptation, work, ending.label, reporter)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    facts |= {"kind": ending.kind, **about, "out": str(out)}

    def conclude() -> dict[str, Any]:
        record, changed = _judge(student, lesson, adaptation, trained, facts, work, control, reporter)
        record["seconds"] = time.perf_counter() - started
        _write(student, record, changed, out, work, ending, lesson.means.force, reporter)
        return record

    return distributed.from_main(conclude)


def _judge(
    student: Checkpoint,
    lesson: Lesson,
    adaptation: Adaptation,
    trained: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    work: Path,
    control: Mapping[str, Any] | None,
    reporter: Reporter,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the training was worth, as a record, and the tensors of the model that it changed."""
    with reporter.waiting("merging"):
        keep = work / ADAPTER if lesson.means.keep_adapter and not adaptation.full else None
        merged = adaptation.merged(load(student.folder, device="cpu", dtype="float32").model, trained, keep)
    changed = student.in_files(merged)
    record = {
        "kind": facts["kind"],
        "name": Path(facts["out"]).name,
        "model": student.source,
        "loader": loader_of(student.family.model_type).to_json(),
        "fingerprint": student.fingerprint,
        "cut": student.cut,
        "teacher": _teacher_record(lesson),
        "settings": lesson.settings.described() | {"adaptation": adaptation.describe()},
        "corpus": lesson.corpus.describe(),
        "tokens": lesson.settings.tokens,
        "measured": _measure(student, lesson, merged, control, reporter),
        **facts,
        "versions": versions(),
        "processes": distributed.count(),
    }
    return record, changed


def _train(
    student: Checkpoint, lesson: Lesson, adaptation: Adaptation, work: Path, label: str, reporter: Reporter
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The trained parameters, and what there is to say about the training."""
    from slimstate.training import trainer

    settings, means, device = lesson.settings, lesson.means, pick_device(lesson.means.device)
    course = means.course(settings)
    precision = pick_dtype(settings.dtype, device)
    teacher = _teacher(lesson, reporter)
    with reporter.waiting("loading the model"):
        runtime = load(student.folder, device=device.type, dtype="float32" if settings.full else settings.dtype)
    torch.manual_seed(settings.seed)
    learner = trainer.Student(
        adaptation.attach(runtime.model), teacher, settings.temperature, settings.kd_weight if teacher else 0.0
    )
    schedule = Schedule(lesson.corpus, settings.steps * settings.batch_size, settings.seed)
    size = sum(parameter.numel() for parameter in trainable(learner).values())
    kernels = describe_kernels(device, precision, student.family.library)
    reporter.say(f"kernels: {kernels}")
    reporter.say(
        f"training {size:,} parameters for {course.steps:,} steps of {course.batch} x {settings.length} tokens:"
        f" {settings.tokens:,} tokens, {schedule.epochs:.2f} epochs"
    )
    if distributed.is_main():
        trainer.remove_broken(work)
    distributed.wait_for_all()
    resume = trainer.last_whole(work)
    if resume is not None:
        reporter.say(f"going on from {resume}")
    arguments = trainer.arguments(course, work, device, precision == torch.bfloat16, list(means.report_to), means.fsdp)
    begun = time.perf_counter()
    trained, log = trainer.train(learner, schedule, course, arguments, settings.length, label, resume, reporter)
    done = course.steps - (0 if resume is None else int(resume.name.rpartition("-")[2]))
    speed = done * course.batch * settings.length / (time.perf_counter() - begun)
    facts = {
        "epochs": schedule.epochs,
        "trained_parameters": size,
        "kernels": kernels,
        "tokens_per_second": speed if done else None,
        "log": plain(log, 6),
    }
    return trained, facts


def _teacher(lesson: Lesson, reporter: Reporter) -> Teacher | None:
    if lesson.teacher is None or lesson.settings.kd_weight == 0:
        return None
    source = lesson.teacher

    def bring() -> Runtime:
        with reporter.waiting("loading the teacher"):
            return load(source.folder, device=lesson.means.device, dtype=lesson.settings.dtype)

    if lesson.cache is None:
        return PresentTeacher(runtime=bring())
    made = lesson.cache.fill(lesson.corpus, bring, reporter)
    reporter.say(f"teacher: {'its best guesses are now in' if made else 'from'} {lesson.cache.folder}")
    return lesson.cache


def _teacher_record(lesson: Lesson) -> dict[str, Any] | None:
    if lesson.teacher is None:
        return None
    return {"model": lesson.teacher.source, "fingerprint": lesson.teacher.fingerprint}


def _measure(
    student: Checkpoint,
    lesson: Lesson,
    merged: Mapping[str, Tensor],
    control: Mapping[str, Any] | None,
    reporter: Reporter,
) -> dict[str, Any]:
    """Mean nats of the student before and after, and of the uncut model, on tokens that were held out."""
    settings, tokens = lesson.settings, lesson.held_out
    runtime = load(student.folder, device=lesson.means.device, dtype=settings.dtype)
    nats = {"before": mean_nats(runtime, tokens, reporter, "measuring before")}
    as_written = {
        name: tensor.to(DTYPES[student.tensors[stored[0]].dtype])
        for name, tensor in merged.items()
        if (stored := student.stored_names(name))
    }
    runtime.model.load_state_dict(as_written, strict=False)
    nats["after"] = mean_nats(runtime, tokens, reporter, "measuring after")
    if control is not None:  # it was the uncut model, measured on the same tokens
        nats |= {"uncut": control["measured"]["nats"]["before"], "control": control["measured"]["nats"]["after"]}
    elif lesson.teacher is not None and lesson.teacher.fingerprint != student.fingerprint:
        runtime = load(lesson.teacher.folder, device=lesson.means.device, dtype=settings.dtype)
        nats["uncut"] = mean_nats(runtime, tokens, reporter, "measuring the uncut model")
    return {
        "text": lesson.measured_on,
        "tokens": tokens.numel(),
        "nats": nats,
        "perplexity": {name: perplexity_of(value) for name, value in nats.items()},
        "closed": {name: share_closed(nats, name) for name in ("uncut", "control") if name in nats},
    }


def share_closed(nats: Mapping[str, float], goal: str) -> float | None:
    """How much of the gap in nats between the cut model and `goal` the recovery closed; None of a gap too small."""
    gap = nats["before"] - nats[goal]
    return (nats["before"] - nats["after"]) / gap if gap > LEAST_GAP else None


def _write(
    student: Checkpoint,
    record: dict[str, Any],
    changed: Mapping[str, Tensor],
    out: Path,
    work: Path,
    ending: Ending,
    force: bool,
    reporter: Reporter,
) -> None:
    """The plain checkpoint with its record and card; the training's logs and its adapter go with it."""
    config = ending.config(student, record)
    documents = {
        ending.record: json.dumps(plain(record), indent=1) + "\n",
        CARD: ending.card(record, config, out.name),
    }
    folders = {name: work / name for name in (ADAPTER, LOGS) if (work / name).is_dir()}
    write_checkpoint(
        student, Replacement(changed), config, documents, out, folders=folders, force=force, reporter=reporter
    )


def recovered_config(student: Checkpoint, record: Mapping[str, Any]) -> dict[str, Any]:
    """The student's config, with this recovery after what was done to the model before."""
    earlier = dict(student.config.get("slimstate") or {})
    teacher = record["teacher"] or {}
    entry = {
        "version": record["versions"].get("slimstate"),
        "model": record["model"],
        "fingerprint": record["fingerprint"],
        "teacher": teacher.get("model"),
        "teacher_fingerprint": teacher.get("fingerprint"),
        "tokens": record["tokens"],
        "settings": record["settings"],
        "corpus": record["corpus"],
    }
    return {**student.config, "slimstate": {**earlier, "recovered": [*earlier.get("recovered", []), entry]}}


RECOVERED = Ending(
    kind="recovery", label="recovering", record=RECOVERY, config=recovered_config, card=write_recovery_card
)
