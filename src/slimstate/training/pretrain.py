"""Pre-train a model on a text, from a config or from where a model stands, and write a plain checkpoint.

An untrained model is a checkpoint like any other, so this is a recovery without a teacher that trains all weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

from slimstate.checkpoints.model_card import write_training_card
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.writer import check_output
from slimstate.data.corpus import Corpus
from slimstate.evaluation.perplexity import evaluation_windows
from slimstate.families.fla_layout import SHARINGS
from slimstate.models.devices import pick_device, pick_dtype
from slimstate.models.load import load_tokenizer
from slimstate.records.base import command
from slimstate.records.training import TRAINING
from slimstate.system import distributed
from slimstate.system.atomic import check_place
from slimstate.system.errors import OutputError, PlanError, SlimstateError
from slimstate.system.progress import SILENT, Reporter
from slimstate.training.initial_model import check_trainable, read_config, write_untrained
from slimstate.training.run_folder import (
    check_extras,
    logs_to,
    prepare_workplace,
    steps_for,
    training_corpus,
    workplace_of,
)
from slimstate.training.session import Ending, Lesson, Means, Settings, heal

UNTRAINED = "untrained"
PASSING = ("config", "reporter", "force", "resume")  # arguments that do not matter to what comes out


@dataclass(frozen=True, kw_only=True)
class Pretraining(Settings):
    """Everything that decides what a pre-training gives, beside the config and the text."""

    WAY_OUT: ClassVar[str] = "choose a config without it, such as one whose layers have no experts"

    steps: int = 4000
    batch_size: int = 64
    length: int = 1024
    lr: float = 3e-3
    min_lr: float = 3e-4
    kd_weight: float = 0.0
    full: bool = True
    second_beta: float = 0.95
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.second_beta < 1 or not self.weight_decay >= 0:
            raise PlanError(
                f"--second-beta {self.second_beta:g} must be from 0 to less than 1, "
                f"--weight-decay {self.weight_decay:g} not negative"
            )

    def described(self) -> dict[str, Any]:
        elsewhere = ("kd_weight", "temperature", "lora_targets", "lora_rank", "lora_alpha", "top_k", "full")
        return {name: value for name, value in vars(self).items() if name not in elsewhere}

    def optimizer(self) -> tuple[float, float]:
        return self.second_beta, self.weight_decay


def train(
    config: str | Path,
    out: str | Path,
    *,
    data: str,
    tokenizer: str | None = None,
    shared_filters: str | None = None,
    steps: int | None = None,
    tokens: int | None = None,
    length: int = Pretraining.length,
    batch_size: int = Pretraining.batch_size,
    grad_accum: int = 1,
    lr: float = Pretraining.lr,
    min_lr: float = Pretraining.min_lr,
    warm_up: float = Pretraining.warm_up,
    weight_decay: float = Pretraining.weight_decay,
    second_beta: float = Pretraining.second_beta,
    eval_text: str | None = None,
    eval_tokens: int | None = None,
    no_repeat: bool = False,
    save_every: int | None = None,
    resume: bool = False,
    report_to: str = "tensorboard",
    fsdp: bool = False,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    force: bool = False,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Train the model that a config describes, or a model further, and write it to `out`. Returns the record.

    Several processes share every batch, and the main one writes; all return when it has.
    """
    asked = {name: value for name, value in locals().items() if name not in PASSING}
    distributed.join(pick_device(device))
    if shared_filters is not None and shared_filters not in SHARINGS:
        raise PlanError(f"--shared-filters {shared_filters}; there are {', '.join(SHARINGS)}")
    settings = Pretraining(
        steps=steps_for(steps, tokens, max(1, batch_size * length), Pretraining.steps),
        batch_size=batch_size,
        length=length,
        lr=lr,
        min_lr=min_lr,
        warm_up=warm_up,
        weight_decay=weight_decay,
        second_beta=second_beta,
        seed=seed,
        dtype=str(pick_dtype(dtype, pick_device(device))).removeprefix("torch."),
    )
    means = Means(
        device=device,
        grad_accum=grad_accum,
        save_every=save_every,
        report_to=logs_to(report_to),
        fsdp=fsdp,
        force=force,
    )
    check_extras(means.report_to, "accelerate")
    means.course(settings)
    return _run(str(config), settings, means, asked, resume=resume, reporter=reporter)


def _run(
    name: str, settings: Pretraining, means: Means, asked: Mapping[str, Any], *, resume: bool, reporter: Reporter
) -> dict[str, Any]:
    out = Path(asked["out"])
    work = workplace_of(out)
    goes_on = Checkpoint.open(name) if Path(name).expanduser().is_dir() else None
    if goes_on is not None:
        if asked["tokenizer"] is not None or asked["shared_filters"] is not None:
            raise PlanError(f"{name} has its tokenizer and its filters: leave out --tokenizer and --shared-filters")
        check_output(goes_on, out, means.force)
        begins_with: Any = goes_on.fingerprint
    else:
        begins_with = read_config(name)
        check_trainable(begins_with, asked["shared_filters"])
    for place in (out, work):
        check_place(place, folder=True)
    if out.exists() and not means.force:
        raise OutputError(f"{out} exists already; choose another place or use --force")
    decided = {
        **settings.described(), "model": begins_with, "data": asked["data"], "tokenizer": asked["tokenizer"],
        "shared_filters": asked["shared_filters"], "eval_text": asked["eval_text"],
    }  # fmt: skip

    def prepare() -> Corpus:
        going_on = prepare_workplace(work, decided, resume, means.force, reporter)
        try:
            if goes_on is None and not (work / UNTRAINED).is_dir():
                with reporter.waiting("making the untrained model"):
                    write_untrained(
                        begins_with,
                        work / UNTRAINED,
                        data=asked["data"],
                        tokenizer=asked["tokenizer"],
                        sharing=asked["shared_filters"],
                        seed=settings.seed,
                        dtype=str(settings.dtype),
                    )
            student = Checkpoint.open(work / UNTRAINED) if goes_on is None else goes_on
            settings.adaptation(student)  # refuses what could not be written back
            return training_corpus(
                load_tokenizer(student.folder),
                asked["data"],
                work,
                steps=settings.steps,
                batch_size=settings.batch_size,
                length=settings.length,
                seed=settings.seed,
                measured_elsewhere=asked["eval_text"] is not None,
                no_repeat=asked["no_repeat"],
                reporter=reporter,
            )
        except SlimstateError:
            if not going_on:
                shutil.rmtree(work, ignore_errors=True)
            raise

    corpus = distributed.from_main(prepare)
    student = Checkpoint.open(work / UNTRAINED) if goes_on is None else goes_on
    lesson = Lesson(
        settings=settings,
        means=means,
        corpus=corpus,
        held_out=_held_out(student, corpus, settings, asked),
        measured_on=asked["eval_text"] or f"windows of {asked['data']} that were not trained on",
        teacher=None,
        cache=None,
    )
    reporter.say(f"{name}: {student.parameters:,} parameters")
    changed = {option: value for option, value in asked.items() if value != DEFAULTS[option]}
    about = {
        "command": command("train", [name], changed),
        "model": name,
        "parameters": student.parameters,
        "shared_filters": student.mixers[0].sharing,
    }
    record = heal(student, lesson, out, work / "model", about, ending=TRAINED, reporter=reporter)
    distributed.from_main(lambda: shutil.rmtree(work, ignore_errors=True))
    return record


def _held_out(student: Checkpoint, corpus: Corpus, settings: Settings, asked: Mapping[str, Any]) -> Any:
    """What the model is measured on: windows of the text that are not trained on, or another text."""
    if asked["eval_text"] is None:
        return corpus.held_out_windows
    tokenizer = load_tokenizer(student.folder)
    return evaluation_windows(tokenizer, asked["eval_text"], min(1024, settings.length), asked["eval_tokens"]).tokens


def trained_config(student: Checkpoint, record: Mapping[str, Any]) -> dict[str, Any]:
    """The model's config, with this training after what was done to the model before."""
    earlier = dict(student.config.get("slimstate") or {})
    entry = {
        "version": record["versions"].get("slimstate"),
        "config": record["model"],
        "tokens": record["tokens"],
        "settings": record["settings"],
        "corpus": record["corpus"],
    }
    return {**student.config, "slimstate": {**earlier, "trained": [*earlier.get("trained", []), entry]}}


TRAINED = Ending(kind="training", label="training", record=TRAINING, config=trained_config, card=write_training_card)
DEFAULTS = {name: parameter.default for name, parameter in signature(train).parameters.items()}
