"""Recover a cut model: fine-tune it on text, with the uncut one as its teacher, and write a plain checkpoint again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from slimstate.checkpoints.model_card import recovery_card
from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.load import load_tokenizer
from slimstate.models.options import RunOptions
from slimstate.models.stock import stock_model
from slimstate.records.display import Displayable
from slimstate.records.schema import from_json, to_json
from slimstate.records.training import RECOVERY, RecoveryRecord, RecoverySettings
from slimstate.serving.model_card import serving_lines
from slimstate.system import distributed
from slimstate.system.atomic import check_place, overlap
from slimstate.system.errors import ModelError, OutputError, PlanError
from slimstate.system.json_files import JsonObject, difference
from slimstate.system.progress import SILENT, Reporter
from slimstate.training.options import ControlOptions, RecoverOptions, TrainerOptions, TrainingText
from slimstate.training.run_checkpoints import CONTROL
from slimstate.training.session import Job, Kind, Session
from slimstate.training.teacher import Distillation, TeacherCache
from slimstate.training.tokens import Tokens

OF_A_TEACHER = ("kd_weight", "temperature", "top_k")  # settings that are nothing without one

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
    uncut = _find_teacher(student, teacher, options, control, reporter)
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
            session = beside.teaching(session)
        return session.train(Job(student=student, out=session.out), tokens, control=made, reporter=reporter)


@dataclass(frozen=True, kw_only=True)
class Preview(Displayable):
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


def preview(
    model: str | PathLike[str],
    *,
    teacher: str | PathLike[str] | None = None,
    control: ControlOptions | None = None,
    options: RecoverOptions | None = None,
    run: RunOptions | None = None,
    reporter: Reporter = SILENT,
) -> Preview:
    """What `recover` would train, without text and without training anything."""
    options, run = options or RecoverOptions(), run or RunOptions()
    student = Checkpoint.open(model)
    options = _for_model(options, student, reporter)
    uncut = _find_teacher(student, teacher, options, control, reporter)
    if control is not None:
        then = " first, on the text alone, and then teach" if control.teaches else ", in the same way"
        reporter.say(f"control: the uncut model would be trained as well{then}")
    adaptation = options.adaptation(student)
    sizes = {name: tensor.shape for name, tensor in stock_model(student.config).state_dict().items()}
    adapted = {f"{name}.weight" for name in adaptation.targets}
    low_rank = sum(adaptation.rank * sum(sizes[name]) for name in adapted)
    whole = sum(sizes[name].numel() for name in adaptation.weights(student.config) if name not in adapted)
    settings = {**options.settings(run), "adaptation": to_json(adaptation.describe())}
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
        settings=from_json(RecoverySettings, settings),
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
            return None
        place = session.out.with_name(f"{session.out.name}-control") if wanted.out is None else Path(wanted.out)
        alone = replace(session, distillation=None) if wanted.teaches else session
        return cls(session=alone, uncut=teaching.teacher, out=place)

    @property
    def is_made(self) -> bool:
        return (self.out / RECOVERY).is_file()

    @property
    def teaches(self) -> bool:
        """Afterwards; so it has no teacher itself."""
        return self.session.distillation is None

    def check_made(self) -> None:
        """One that was made before was made of the same model with the same settings."""
        if not self.is_made:
            return
        found, teaching = RecoveryRecord.read(self.out / RECOVERY), self.session.distillation
        ours = _decisive(self.session.options.settings(self.session.run), teaching is not None)
        theirs = _decisive(to_json(found.settings), found.teacher is not None)
        self._refuse({**theirs, "model": found.fingerprint}, {**ours, "model": self.uncut.fingerprint})

    def found(self, tokens: Tokens) -> RecoveryRecord | None:
        """The record of a control that was made before; one of another text is refused."""
        if not self.is_made:
            return None
        found = RecoveryRecord.read(self.out / RECOVERY)
        ours = {
            "tokens": tokens.corpus.digest,
            "measured on": f"{tokens.held_out.numel()} tokens of {tokens.measured_on}",
        }
        theirs = {
            "tokens": None if found.corpus is None else found.corpus.digest,
            "measured on": f"{found.measured.tokens} tokens of {found.measured.text}",
        }
        self._refuse(theirs, ours)
        return found

    def _refuse(self, theirs: JsonObject, ours: JsonObject) -> None:
        if (other := difference(theirs, ours)) is not None:
            raise OutputError(
                f"{self.out} is a control of other settings: {other}; remove it, or choose another `control_out`"
            )

    def train(self, tokens: Tokens, reporter: Reporter) -> RecoveryRecord:
        if (found := self.found(tokens)) is not None:
            reporter.say(f"control: {self.out}, made before with the same settings")
            return found
        if self.teaches:
            reporter.say(f"control: the uncut model is trained on the text alone, into {self.out}; then it teaches")
        else:
            reporter.say(f"control: the uncut model gets the same training, into {self.out}")
        return self.session.train(Job(student=self.uncut, out=self.out, part=CONTROL), tokens, reporter=reporter)

    def teaching(self, session: Session[RecoveryRecord]) -> Session[RecoveryRecord]:
        """The session in which it is the teacher, once it is trained."""
        tuned = Checkpoint.open(self.out)
        distributed.from_main(lambda: session.run_folder.check_teacher(tuned.fingerprint))
        kind = replace(
            session.kind, record=lambda outcome, student: RecoveryRecord(**vars(outcome), control_teaches=True)
        )
        assert session.distillation is not None
        return replace(session, kind=kind, distillation=replace(session.distillation, teacher=tuned))


def _decisive(settings: JsonObject, has_teacher: bool) -> JsonObject:
    """What decided a control: the settings of a distillation only where there was one."""
    if has_teacher and settings["kd_weight"]:
        return {"taught": True, **settings}
    return {"taught": False, **{name: value for name, value in settings.items() if name not in OF_A_TEACHER}}


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
    student: Checkpoint,
    given: str | PathLike[str] | None,
    options: RecoverOptions,
    control: ControlOptions | None,
    reporter: Reporter,
) -> Checkpoint | None:
    """The model to learn from: the one given, or the one the student says it was cut from."""
    if control is not None:
        control.check(options)
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
    if uncut.fingerprint == student.fingerprint and control is not None and control.teaches:
        raise PlanError(f"`control_teaches`: {student.source} is the uncut model; give one cut from it")
    if uncut.fingerprint == student.fingerprint and control is None:
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
    if control is not None:
        for other in (session.out, session.folder):
            if overlap(control.out, other):
                raise OutputError(f"{control.out} is, holds or lies in {other}: choose another `control_out`")
        control.check_made()
        if not control.is_made:
            outs.append(control.out)
    teaching = session.distillation
    if teaching is not None:
        sources.append(teaching.teacher)
    session.check(sources, outs)
    if teaching is not None and teaching.cache is not None:
        check_place(teaching.cache.folder, folder=True)
        teaching.cache.check()
