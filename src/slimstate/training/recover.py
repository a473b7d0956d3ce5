"""Recover a cut model: fine-tune it on text, with the uncut one as its teacher, and write a plain checkpoint again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from slimstate.checkpoints.model_card import recovery_card
from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.devices import RunOptions
from slimstate.models.load import load_tokenizer
from slimstate.models.stock import stock_model
from slimstate.records.schema import read, written
from slimstate.records.shown import Shown
from slimstate.records.training import RECOVERY, RecoveryRecord, RecoverySettings
from slimstate.serving.model_card import serving_lines
from slimstate.system import distributed
from slimstate.system.atomic import check_place
from slimstate.system.errors import ModelError, OutputError, PlanError
from slimstate.system.json_files import JsonObject, difference
from slimstate.system.progress import SILENT, Reporter
from slimstate.training.options import ControlOptions, RecoverOptions, TrainerOptions, TrainingText
from slimstate.training.session import CONTROL, Job, Kind, Session
from slimstate.training.teacher import Distillation, TeacherCache
from slimstate.training.tokens import Tokens

RECOVERED = Kind(
    verb="recover",
    label="recovering",
    settings=RecoverySettings,
    record=lambda outcome, student: RecoveryRecord(**vars(outcome)),
    card=lambda record, config, name: recovery_card(record, config, name) + serving_lines(config),
)


def recover(
    model: str | PathLike[str],
    out: str | Path,
    *,
    data: str | Path | Iterable[object] | TrainingText,
    teacher: str | PathLike[str] | None = None,
    control: ControlOptions | None = None,
    options: RecoverOptions | None = None,
    trainer: TrainerOptions | None = None,
    run: RunOptions | None = None,
    reporter: Reporter = SILENT,
) -> RecoveryRecord:
    """Fine-tune a cut model, and write it to `out`. Returns the record.

    The teacher is by default the model it was cut from. With `control` the uncut model gets the same training too; one
    that teaches gets it first, from the text alone, and is then learnt from in place of the uncut model. Several
    processes share every batch, and the main one writes; all return when it has.
    """
    options, trainer, run = options or RecoverOptions(), trainer or TrainerOptions(), run or RunOptions()
    distributed.join(run.place)
    student = Checkpoint.open(model)
    options = _for_model(options, student, reporter)
    uncut = _find_teacher(student, teacher, options, control is not None, reporter)
    if control is not None:
        if uncut is None:
            raise PlanError(f"`{control.asked}` fine-tunes the uncut model too: give it with `teacher`")
        control.check(options)
    session = Session(
        kind=RECOVERED,
        model=student.source,
        out=Path(out),
        given={"teacher": teacher, **({} if control is None else control.given())},
        text=TrainingText.of(data),
        options=options,
        trainer=trainer,
        run=run,
        distillation=_distillation(uncut, options, run),
    )
    beside = None if control is None else _Control.of(session, student, control)
    _check(session, student, beside)
    teaches = control is not None and control.teaches
    begun_with = {
        "model": student.fingerprint,
        "teacher": None if uncut is None else uncut.fingerprint,
        "control": "teaches" if teaches else control is not None,
    }
    accept = {} if beside is None else {"accept": beside.found}
    with session.prepared(lambda: student, begun_with, reporter, **accept) as tokens:
        made = None if beside is None else beside.train(tokens, reporter)
        if teaches and beside is not None:
            session = replace(session, distillation=_distillation(Checkpoint.open(beside.out), options, run))
        return session.train(Job(student=student, out=session.out), tokens, control=made, reporter=reporter)


@dataclass(frozen=True, kw_only=True)
class Preview(Shown):
    """What would be trained, by the full names of the modules."""

    model: str
    teacher: str | None
    targets: tuple[str, ...]
    convolutions: tuple[str, ...]
    unfrozen: tuple[str, ...]
    trained_parameters: int
    parameters: int
    steps: int
    tokens: int
    settings: RecoverySettings
    out: None = None

    def headline(self) -> str:
        return f"{self.model}: {self.trained_parameters:,} of {self.parameters:,} parameters would be trained"

    def to_json(self) -> JsonObject:
        return dict(written(self))


def preview(
    model: str | PathLike[str],
    *,
    teacher: str | PathLike[str] | None = None,
    control: bool = False,
    options: RecoverOptions | None = None,
    run: RunOptions | None = None,
    reporter: Reporter = SILENT,
) -> Preview:
    """What `recover` would train, without text and without training anything."""
    options, run = options or RecoverOptions(), run or RunOptions()
    student = Checkpoint.open(model)
    options = _for_model(options, student, reporter)
    uncut = _find_teacher(student, teacher, options, control, reporter)
    adaptation = options.adaptation(student)
    sizes = {name: tensor.shape for name, tensor in stock_model(student.config).state_dict().items()}
    adapted = {f"{name}.weight" for name in adaptation.targets}
    low_rank = sum(adaptation.rank * sum(sizes[name]) for name in adapted)
    whole = sum(sizes[name].numel() for name in adaptation.weights(student.config) if name not in adapted)
    settings = {**options.settings(run), "adaptation": written(adaptation.describe())}
    return Preview(
        model=student.source,
        teacher=None if uncut is None else uncut.source,
        targets=adaptation.targets,
        convolutions=adaptation.convolutions,
        unfrozen=(*adaptation.norms, *adaptation.biases),
        trained_parameters=student.parameters if adaptation.full else low_rank + whole,
        parameters=student.parameters,
        steps=options.total_steps,
        tokens=options.total_tokens,
        settings=read(RecoverySettings, settings),
    )


@dataclass(frozen=True, kw_only=True)
class _Control:
    """The uncut model, which gets the same training into a folder of its own; or has had it, in an earlier session.

    One that teaches afterwards learns from the text alone.
    """

    session: Session[RecoveryRecord]
    uncut: Checkpoint
    out: Path

    @classmethod
    def of(cls, session: Session[RecoveryRecord], student: Checkpoint, wanted: ControlOptions) -> _Control | None:
        """None where there is no other model than the student to train as well."""
        teaching = session.distillation
        if teaching is None or teaching.teacher.fingerprint == student.fingerprint:
            if wanted.teaches:
                raise PlanError(
                    f"`control_teaches`: {student.source} is the uncut model; give one that was cut from it"
                )
            return None
        place = session.out.with_name(f"{session.out.name}-control") if wanted.out is None else Path(wanted.out)
        alone = replace(session, distillation=None) if wanted.teaches else session
        return cls(session=alone, uncut=teaching.teacher, out=place)

    @property
    def is_made(self) -> bool:
        return (self.out / RECOVERY).is_file()

    def found(self, tokens: Tokens) -> RecoveryRecord | None:
        """The record of a control that was made before; one of other settings is refused."""
        if not self.is_made:
            return None
        found = RecoveryRecord.read(self.out / RECOVERY)
        ours = {
            **self.session.options.settings(self.session.run),
            "taught": self.session.distillation is not None,
            "model": self.uncut.fingerprint,
            "tokens": tokens.corpus.digest,
            "measured on": f"{tokens.held_out.numel()} tokens of {tokens.measured_on}",
        }
        theirs = {
            **written(found.settings),
            "taught": found.teacher is not None,
            "model": found.fingerprint,
            "tokens": None if found.corpus is None else found.corpus.digest,
            "measured on": f"{found.measured.tokens} tokens of {found.measured.text}",
        }
        if (other := difference(theirs, ours)) is not None:
            raise OutputError(f"{self.out} is a control of other settings: {other}; choose another `control_out`")
        return found

    def train(self, tokens: Tokens, reporter: Reporter) -> RecoveryRecord:
        if (found := self.found(tokens)) is not None:
            reporter.say(f"control: {self.out}, made before with the same settings")
            return found
        alone = "" if self.session.distillation is not None else " from the text alone, and teaches then"
        reporter.say(f"control: the uncut model gets the same training{alone}, into {self.out}")
        return self.session.train(Job(student=self.uncut, out=self.out, part=CONTROL), tokens, reporter=reporter)


def _for_model(given: RecoverOptions, student: Checkpoint, reporter: Reporter) -> RecoverOptions:
    options = given.for_model(student)
    if options.mixers and not given.mixers:
        reporter.say("the mixers alone are trained: the files keep other weights, such as experts, in another form")
    return options


def _distillation(uncut: Checkpoint | None, options: RecoverOptions, run: RunOptions) -> Distillation | None:
    if uncut is None:
        return None
    cache = None
    if options.cache_teacher is not None:
        cache = TeacherCache(
            folder=Path(options.cache_teacher),
            model=uncut.fingerprint,
            dtype=run.precision_name,
            temperature=options.temperature,
            top_k=min(options.cache_top_k, int(uncut.config["vocab_size"]) - 1),
        )
    return Distillation(teacher=uncut, weight=options.kd_weight, temperature=options.temperature, cache=cache)


def _find_teacher(
    student: Checkpoint, given: str | PathLike[str] | None, options: RecoverOptions, control: bool, reporter: Reporter
) -> Checkpoint | None:
    """The model to learn from: the one given, or the one the student says it was cut from."""
    if options.no_teacher:
        if given is not None:
            raise PlanError("give either `teacher` or `no_teacher`")
        return None
    if given is None:
        base = (student.cut or {}).get("base_model")
        if base is None or not Path(base).is_dir():
            raise PlanError("give the uncut model with `teacher`, or `no_teacher` to learn from the text alone")
        reporter.say(f"teacher: {base}, which the model was cut from")
        given = base
    uncut = Checkpoint.open(given)
    if uncut.fingerprint == student.fingerprint and not control:
        raise PlanError(f"the teacher {given} is the model itself; it must be the uncut one (or give `control`)")
    sizes = [checkpoint.config.get("vocab_size") for checkpoint in (student, uncut)]
    if sizes[0] != sizes[1]:
        raise ModelError(f"{student.source} has a vocabulary of {sizes[0]}, the teacher {given} one of {sizes[1]}")
    vocabularies = [load_tokenizer(checkpoint.folder).get_vocab() for checkpoint in (student, uncut)]
    if vocabularies[0] != vocabularies[1]:
        raise ModelError(f"{student.source} and the teacher {given} have different tokenizers")
    return uncut


def _check(session: Session[RecoveryRecord], student: Checkpoint, control: _Control | None) -> None:
    """All that can be seen to go wrong before anything is read or written."""
    session.options.settings(session.run)
    if not session.options.adaptation(student).adapted and session.trainer.keep_adapter:
        raise PlanError("`keep_adapter`: there is none, all that is trained is trained whole; give `lora`")
    sources, outs = [student], [session.out]
    if control is not None and control.out.resolve() == session.out.resolve():
        raise OutputError(f"{control.out} cannot hold both the model and its control: choose another `control_out`")
    if control is not None and not control.is_made:
        outs.append(control.out)
    teaching = session.distillation
    if teaching is not None:
        sources.append(teaching.teacher)
    session.check(sources, outs)
    if teaching is not None and teaching.cache is not None:
        check_place(teaching.cache.folder, folder=True)
        teaching.cache.check()
