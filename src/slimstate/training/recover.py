"""Heal a cut model: fine-tune it on text, with the uncut model as its teacher, and write a plain checkpoint again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.writer import check_output
from slimstate.data.corpus import Corpus
from slimstate.evaluation.perplexity import evaluation_windows
from slimstate.models.devices import pick_device, pick_dtype
from slimstate.models.load import load_tokenizer
from slimstate.models.stock import stock_model
from slimstate.records.base import command
from slimstate.records.training import RECOVERY
from slimstate.system import distributed
from slimstate.system.atomic import check_place
from slimstate.system.errors import ModelError, OutputError, PlanError, SlimstateError
from slimstate.system.json_files import difference, read_json
from slimstate.system.progress import SILENT, Reporter
from slimstate.training.run_folder import (
    check_extras,
    logs_to,
    prepare_workplace,
    steps_for,
    training_corpus,
    workplace_of,
)
from slimstate.training.session import Lesson, Means, Settings, heal
from slimstate.training.teacher import TeacherCache

PASSING = ("model", "reporter", "dry_run", "force", "resume")  # arguments that do not matter to what comes out


def recover(
    model: str | Path,
    out: str | Path | None = None,
    *,
    data: str | None = None,
    teacher: str | Path | None = None,
    no_teacher: bool = False,
    control: bool = False,
    control_out: str | Path | None = None,
    steps: int | None = None,
    tokens: int | None = None,
    length: int = 2048,
    batch_size: int = 16,
    grad_accum: int = 1,
    lr: float = 1e-4,
    min_lr: float = 1e-5,
    warm_up: float = 0.05,
    kd_weight: float = 1.0,
    temperature: float = 2.0,
    full: bool = False,
    lora_targets: str | None = None,
    lora_rank: int = 16,
    lora_alpha: int = 32,
    cache_teacher: str | Path | None = None,
    cache_top_k: int = 64,
    eval_text: str | None = None,
    eval_tokens: int | None = None,
    no_repeat: bool = False,
    save_every: int | None = None,
    resume: bool = False,
    keep_adapter: bool = False,
    report_to: str = "tensorboard",
    fsdp: bool = False,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Fine-tune a cut model and write it to `out`; with `dry_run`, only say what would be trained. Returns the record.

    Several processes share every batch, and the main one writes; all return when it has.
    """
    asked = {name: value for name, value in locals().items() if name not in PASSING}
    distributed.join(pick_device(device))
    student = Checkpoint.open(model)
    if no_teacher and teacher is not None:
        raise PlanError("give either --teacher or --no-teacher")
    master = None if no_teacher else _find_teacher(student, teacher, control, reporter)
    settings = Settings(
        steps=steps_for(steps, tokens, max(1, batch_size * length), Settings.steps),
        batch_size=batch_size,
        length=length,
        lr=lr,
        min_lr=min_lr,
        warm_up=warm_up,
        kd_weight=kd_weight,
        temperature=temperature,
        full=full,
        lora_targets=lora_targets,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        top_k=cache_top_k if cache_teacher is not None else None,
        seed=seed,
        dtype=str(pick_dtype(dtype, pick_device(device))).removeprefix("torch."),
    )
    means = Means(
        device=device,
        grad_accum=grad_accum,
        save_every=save_every,
        report_to=logs_to(report_to),
        fsdp=fsdp,
        keep_adapter=keep_adapter,
        force=force,
    )
    if dry_run:
        return _preview(student, master, settings)
    if out is None or data is None:
        raise PlanError("give --data TEXT and --out DIR, or --dry-run to train nothing")
    if control and master is None:
        raise PlanError("--control fine-tunes the uncut model too: give it with --teacher")
    check_extras(means.report_to, "peft", "accelerate")
    means.course(settings)
    settings.adaptation(student)
    _check_outputs(student, master, asked, force)
    return _run(student, master, settings, means, asked, resume=resume, reporter=reporter)


def _run(
    student: Checkpoint,
    master: Checkpoint | None,
    settings: Settings,
    means: Means,
    asked: Mapping[str, Any],
    *,
    resume: bool,
    reporter: Reporter,
) -> dict[str, Any]:
    out = Path(asked["out"])
    work = workplace_of(out)
    cache = None
    if asked["cache_teacher"] is not None:
        if master is None:
            raise PlanError("--cache-teacher without a teacher: leave out --no-teacher")
        cache = TeacherCache(
            folder=Path(asked["cache_teacher"]),
            model=master.fingerprint,
            dtype=str(settings.dtype),
            temperature=settings.temperature,
            top_k=min(asked["cache_top_k"], int(master.config["vocab_size"]) - 1),
        )
        cache.check()
    decided = {
        **vars(settings), "model": student.fingerprint, "teacher": None if master is None else master.fingerprint,
        "data": asked["data"], "eval_text": asked["eval_text"], "control": asked["control"],
    }  # fmt: skip
    text, unseen = asked["eval_text"], None
    if asked["eval_tokens"] is not None and asked["eval_tokens"] < 2:
        raise PlanError(f"--eval-tokens {asked['eval_tokens']}: at least 2 are needed")
    if text is not None:
        tokenizer = load_tokenizer(student.folder)
        unseen = evaluation_windows(tokenizer, text, min(1024, settings.length), asked["eval_tokens"]).tokens

    def lesson_on(corpus: Corpus) -> Lesson:
        return Lesson(
            settings=settings,
            means=means,
            corpus=corpus,
            held_out=corpus.held_out_windows if unseen is None else unseen,
            measured_on=f"windows of {asked['data']} that were not trained on" if text is None else text,
            teacher=master,
            cache=cache,
        )

    def prepare() -> Corpus:
        going_on = prepare_workplace(work, decided, resume, means.force, reporter)
        try:
            corpus = training_corpus(
                load_tokenizer(student.folder),
                asked["data"],
                work,
                steps=settings.steps,
                batch_size=settings.batch_size,
                length=settings.length,
                seed=settings.seed,
                measured_elsewhere=text is not None,
                no_repeat=asked["no_repeat"],
                reporter=reporter,
            )
            _earlier_control(student, lesson_on(corpus), asked)
        except SlimstateError:
            if not going_on:
                shutil.rmtree(work, ignore_errors=True)
            raise
        return corpus

    lesson = lesson_on(distributed.from_main(prepare))
    changed = {name: value for name, value in asked.items() if value != DEFAULTS[name]}
    about = {"command": command("recover", [student.source], changed)}
    beside = _control(student, lesson, asked, work, about, reporter)
    record = heal(student, lesson, out, work / "model", about, control=beside, reporter=reporter)
    distributed.from_main(lambda: shutil.rmtree(work, ignore_errors=True))
    return record


def _control(
    student: Checkpoint,
    lesson: Lesson,
    asked: Mapping[str, Any],
    work: Path,
    about: Mapping[str, Any],
    reporter: Reporter,
) -> dict[str, Any] | None:
    """The record of the uncut model after the same training: made now, or found where an earlier run left it."""
    if not _wants_control(student, lesson, asked):
        return None
    assert lesson.teacher is not None
    out = control_folder(asked)
    if (found := _earlier_control(student, lesson, asked)) is not None:
        reporter.say(f"control: {out}, made before with the same settings")
        return found
    reporter.say(f"control: the uncut model gets the same training, into {out}")
    return heal(lesson.teacher, lesson, out, work / "control", about, reporter=reporter)


def _wants_control(student: Checkpoint, lesson: Lesson, asked: Mapping[str, Any]) -> bool:
    """Whether another model than the student is to be trained as well."""
    return asked["control"] and lesson.teacher is not None and lesson.teacher.fingerprint != student.fingerprint


def _earlier_control(student: Checkpoint, lesson: Lesson, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of a control that was made before; one of other settings is refused."""
    out = control_folder(asked)
    if not _wants_control(student, lesson, asked) or not (out / RECOVERY).is_file():
        return None
    found = read_json(out / RECOVERY)
    if (other := _difference(found, lesson)) is not None:
        raise OutputError(f"{out} is a control of other settings: {other}; choose another --control-out")
    return found


def control_folder(asked: Mapping[str, Any]) -> Path:
    out = Path(asked["out"])
    return out.with_name(f"{out.name}-control") if asked["control_out"] is None else Path(asked["control_out"])


def _difference(found: Mapping[str, Any], lesson: Lesson) -> str | None:
    """What an earlier control was made with that this one would not be."""
    assert lesson.teacher is not None
    ours = {
        **vars(lesson.settings), "model": lesson.teacher.fingerprint, "tokens": lesson.corpus.digest,
        "measured on": f"{lesson.held_out.numel()} tokens of {lesson.measured_on}",
    }  # fmt: skip
    measured = found.get("measured", {})
    theirs = {
        **found.get("settings", {}), "model": found.get("fingerprint"), "tokens": found.get("corpus", {}).get("digest"),
        "measured on": f"{measured.get('tokens')} tokens of {measured.get('text')}",
    }  # fmt: skip
    return difference(theirs, ours)


def _find_teacher(student: Checkpoint, given: str | Path | None, control: bool, reporter: Reporter) -> Checkpoint:
    """The model to learn from: the one given, or the one the student says it was cut from."""
    if given is None:
        base = (student.cut or {}).get("base_model")
        if base is None or not Path(base).is_dir():
            raise PlanError("give the uncut model with --teacher, or --no-teacher to learn from the text alone")
        reporter.say(f"teacher: {base}, which the model was cut from")
        given = base
    master = Checkpoint.open(given)
    if master.fingerprint == student.fingerprint and not control:
        raise PlanError(f"the teacher {given} is the model itself; it must be the uncut one (or give --control)")
    sizes = [checkpoint.config.get("vocab_size") for checkpoint in (student, master)]
    if sizes[0] != sizes[1]:
        raise ModelError(f"{student.source} has a vocabulary of {sizes[0]}, the teacher {given} one of {sizes[1]}")
    vocabularies = [load_tokenizer(checkpoint.folder).get_vocab() for checkpoint in (student, master)]
    if vocabularies[0] != vocabularies[1]:
        raise ModelError(f"{student.source} and the teacher {given} have different tokenizers")
    return master


def _check_outputs(student: Checkpoint, master: Checkpoint | None, asked: Mapping[str, Any], force: bool) -> None:
    """Every folder that will be written can be, before the work that would be lost."""
    outs = [Path(asked["out"])]
    if asked["control"]:
        beside = control_folder(asked)
        if outs[0].resolve() == beside.resolve():
            raise OutputError(f"{beside} cannot hold both the model and its control: choose another --control-out")
        if not (beside / RECOVERY).is_file():
            outs.append(beside)
    check_place(workplace_of(outs[0]), folder=True)
    for out in outs:
        check_place(out, folder=True)
        for checkpoint in (student, master):
            if checkpoint is not None:
                check_output(checkpoint, out, force)
    if asked["cache_teacher"] is not None:
        check_place(Path(asked["cache_teacher"]), folder=True)


def _preview(student: Checkpoint, master: Checkpoint | None, settings: Settings) -> dict[str, Any]:
    """What would be trained, by the full names of the modules."""
    adaptation = settings.adaptation(student)
    tensors = stock_model(student.config).state_dict()
    sizes = {name.rpartition(".")[0]: tensor.shape for name, tensor in tensors.items() if name.endswith(".weight")}
    adapted = sum(settings.lora_rank * sum(sizes[name]) for name in adaptation.targets)
    whole = sum(sizes[name].numel() for name in adaptation.convolutions)
    return {
        "model": student.source,
        "teacher": None if master is None else master.source,
        "targets": list(adaptation.targets),
        "convolutions": list(adaptation.convolutions),
        "trained_parameters": student.parameters if settings.full else adapted + whole,
        "parameters": student.parameters,
        "steps": settings.steps,
        "tokens": settings.tokens,
        "settings": vars(settings),
        "out": None,
    }


DEFAULTS = {name: parameter.default for name, parameter in signature(recover).parameters.items()}
