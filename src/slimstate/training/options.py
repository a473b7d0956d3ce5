"""What can be said of a training, as values that check themselves.

`TrainOptions` and its kinds hold all that decides the result, and are compared when a run is resumed; `TrainingText`
says what is trained and measured on; `TrainerOptions` changes how a training is run, and nothing of what it gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.documents import check_documents
from slimstate.data.rows import Texts, as_text_source
from slimstate.models.options import RunOptions
from slimstate.system import distributed
from slimstate.system.errors import PlanError
from slimstate.system.json_files import JsonObject
from slimstate.training.lora import Adaptation, unfrozen_kinds

RANK, ALPHA = 16, 32  # of adapters
RATE, WIDTH = 5e-4, 512  # the learning rate of a recovery, for models up to this hidden size
LEAST_RATE = 0.05  # of the highest, at the end
ONLY_ONCE = ("resume", "force")  # of one run, and no part of the command that does it again


@dataclass(frozen=True, kw_only=True)
class TrainingText:
    """The text that is trained on, and the one that is measured on.

    Parameters:
        data: what is trained on: a path, a dataset's name, or strings, chats or rows in a list or any iterable.
        eval_text: what is measured on, in the same forms; by default windows of `data` that are held out.
        eval_tokens: of its beginning; by default all.
        no_repeat: refuse to read any of `data` twice.
        documents: how those of both are told apart, by default as each suggests: lines, blank, file or rows.

    Examples:
        >>> text = slimstate.TrainingText(data="text.txt", eval_text="test.txt")
        >>> slimstate.recover("slim", "recovered", data=text)
    """

    data: str | Texts
    eval_text: str | Texts | None = None
    eval_tokens: int | None = None
    no_repeat: bool = False
    documents: str | None = None

    def __post_init__(self) -> None:
        check_documents(self.documents)
        for name in ("data", "eval_text"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_text_source(given))
        if self.eval_tokens is not None and self.eval_tokens < 2:
            raise PlanError(f"`eval_tokens` {self.eval_tokens}: at least 2 are needed")

    @classmethod
    def of(cls, data: str | Path | Iterable[object] | TrainingText) -> TrainingText:
        return data if isinstance(data, TrainingText) else cls(data=as_text_source(data))


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What decides the result of any training. How long it is can be said in steps or in tokens."""

    DEFAULT_STEPS: ClassVar[int] = 4000
    WAY_OUT: ClassVar[str] = "choose a config without it, such as one whose layers have no experts"
    NO_SETTINGS: ClassVar[tuple[str, ...]] = ("tokens",)  # fields that records do not keep as they are

    steps: int | None = None
    tokens: int | None = None
    batch_size: int = 64
    length: int = 1024
    lr: float | None = None
    min_lr: float | None = None
    warm_up: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1), ("length", 2)):
            at_least(name, getattr(self, name), least)
        if self.steps is not None and self.tokens is not None:
            raise PlanError("give either `steps` or `tokens`")
        if self.tokens is not None and self.tokens < self.tokens_per_step:
            raise PlanError(f"`tokens` {self.tokens}: one step alone takes {self.tokens_per_step}")
        self._check_rates()
        if not 0 <= self.warm_up < 1:
            raise PlanError(f"`warm_up` {self.warm_up:g}: it is a share of the steps, from 0 to less than 1")

    def _check_rates(self) -> None:
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise PlanError(f"`lr` {self.lr:g}: a learning rate is a finite number above 0")
        if self.min_lr is not None and not 0 <= self.min_lr <= (math.inf if self.lr is None else self.lr):
            until = "" if self.lr is None else f" from {self.lr:g}"
            raise PlanError(f"`min_lr` {self.min_lr:g}: a learning rate falls{until}, and ends at 0 or above")

    @property
    def packages(self) -> tuple[str, ...]:
        """What must be installed beside transformers."""
        return ("accelerate",)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.length

    @property
    def total_steps(self) -> int:
        if self.tokens is not None:
            return self.tokens // self.tokens_per_step
        return self.DEFAULT_STEPS if self.steps is None else self.steps

    @property
    def total_tokens(self) -> int:
        return self.total_steps * self.tokens_per_step

    @property
    def samples(self) -> int:
        """Windows in all steps."""
        return self.total_steps * self.batch_size

    def settings(self, run: RunOptions) -> JsonObject:
        """All that decides the result, by the names that records have for it."""
        if run.precision_name == "float16":
            raise PlanError("`dtype` float16 cannot be trained in without losing gradients: use bfloat16 or float32")
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in self.NO_SETTINGS}
        return {**given, "steps": self.total_steps, "dtype": run.precision_name}

    def optimizer(self) -> tuple[float, float]:
        """AdamW's second beta and its weight decay."""
        return 0.999, 0.0

    def adaptation(self, student: Checkpoint) -> Adaptation:
        """What is trained; all of it can be written back into files like the student's."""
        adaptation = self._adaptation(student)
        if (name := _not_written(adaptation, student)) is not None:
            raise PlanError(
                f"{name} is kept in another form in the files of {student.family.model_type} models, and cannot be"
                f" trained: {self.WAY_OUT}"
            )
        return adaptation

    def _adaptation(self, student: Checkpoint) -> Adaptation:
        return Adaptation.of(student.config, student.mixers, full=True)


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(TrainOptions):
    """What decides the result of a pre-training, beside the config and the text.

    Parameters:
        steps: how long it is; or
        tokens: the same in tokens.
        batch_size: windows in a step, over all processes.
        length: tokens in a window.
        lr: the learning rate at its highest.
        min_lr: the one it ends with.
        warm_up: the share of the steps in which it rises.
        seed: for the weights and the order of the windows.
        second_beta: of AdamW.
        weight_decay: of AdamW.

    Examples:
        >>> slimstate.train("delta_net-5m", "tiny", data="text.txt", options=slimstate.PretrainOptions(steps=100))
    """

    lr: float = 3e-3
    min_lr: float = 3e-4
    second_beta: float = 0.95
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.second_beta < 1 or not self.weight_decay >= 0:
            raise PlanError(
                f"`second_beta` {self.second_beta:g} must be from 0 to less than 1, "
                f"`weight_decay` {self.weight_decay:g} not negative"
            )

    def optimizer(self) -> tuple[float, float]:
        return self.second_beta, self.weight_decay


@dataclass(frozen=True, kw_only=True)
class RecoverOptions(TrainOptions):
    """What decides the result of a recovery.

    All weights are trained by default; only the mixers where the files keep others, such as experts, in another form.
    `RecoverOptions.paper()` is the paper's recovery, with what its released code trains.

    Parameters:
        steps: how long it is; or
        tokens: the same in tokens.
        batch_size: windows in a step, over all processes.
        length: tokens in a window.
        lr: the learning rate at its highest; by default 5e-4 for models up to 512 wide, and less for wider ones.
        min_lr: the one it ends with; by default a twentieth.
        warm_up: the share of the steps in which it rises.
        seed: for adapters and the order of the windows.
        kd_weight: the weight of the teacher beside the cross entropy.
        temperature: of the distillation.
        no_teacher: learn from the text alone.
        cache_teacher: a folder that keeps the teacher's best guesses, which then are all that counts of it.
        cache_top_k: how many for each token.
        full: train all weights.
        mixers: train the mixers whole, and nothing else.
        lora: train low-rank adapters and the convolutions; so do `lora_targets`, `unfreeze`, another rank or alpha.
        lora_targets: linear maps with adapters, or "all-linear"; by default every projection of the mixers.
        lora_rank: rank of the adapters.
        lora_alpha: their scale.
        unfreeze: "norms", "biases" or both, trained as well.

    Examples:
        >>> slimstate.recover("slim", "recovered", data="text.txt", options=slimstate.RecoverOptions(steps=200))
    """

    DEFAULT_STEPS: ClassVar[int] = 2000
    WAY_OUT: ClassVar[str] = "leave out `full` and `unfreeze`, or choose `lora_targets` without it"
    NO_SETTINGS: ClassVar[tuple[str, ...]] = ("tokens", "no_teacher", "cache_teacher", "cache_top_k", "lora")

    batch_size: int = 16
    length: int = 2048
    kd_weight: float = 4.0
    temperature: float = 2.0
    no_teacher: bool = False
    cache_teacher: str | Path | None = None
    cache_top_k: int = 64
    full: bool = False
    mixers: bool = False
    lora: bool = False
    lora_targets: str | None = None
    lora_rank: int = RANK
    lora_alpha: int = ALPHA
    unfreeze: str | None = None

    @classmethod
    def paper(cls) -> RecoverOptions:
        """The paper's recovery: its numbers, and where its text is silent what its released code trains.

        (L634) is a line of the paper's source. The convolutions are always trained whole (L634), as the code does.
        """
        return cls(
            steps=2000,  # 32k samples (L634) in batches of 16
            batch_size=16,  # L634
            length=2048,  # L634
            lr=1e-4,  # L634
            min_lr=1e-5,  # L634
            warm_up=0.05,  # L634
            lora_rank=16,  # L634; 32 in the released code
            lora_alpha=32,  # L634; 64 in the released code
            lora_targets="q_proj,k_proj,v_proj",  # released code
            unfreeze="norms,biases",  # released code
            kd_weight=1.0,  # ours: the paper distils from the original model (L634) and names no weight
            temperature=2.0,  # ours: nor a temperature
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        unfrozen_kinds(self.unfreeze)
        if self.lora and (self.full or self.mixers):
            raise PlanError(f"give either `lora` or `{'full' if self.full else 'mixers'}`")
        if not 0 < self.temperature < math.inf or not 0 <= self.kd_weight < math.inf:
            raise PlanError(
                f"`temperature` {self.temperature:g} must be positive, `kd_weight` {self.kd_weight:g} not negative"
            )
        if self.cache_teacher is not None:
            at_least("cache_top_k", self.cache_top_k, 1)
            if self.no_teacher:
                raise PlanError("`cache_teacher` without a teacher: leave out `no_teacher`")

    @property
    def packages(self) -> tuple[str, ...]:
        return ("peft", *super().packages) if self.adapts else super().packages

    @property
    def adapts(self) -> bool:
        """Whether adapters were asked for."""
        other = (self.lora_rank, self.lora_alpha) != (RANK, ALPHA)
        return self.lora or other or self.lora_targets is not None or self.unfreeze is not None

    def for_model(self, student: Checkpoint) -> RecoverOptions:
        """With what was left to the model: the learning rate, and what is trained."""
        lr = rate_for(student) if self.lr is None else self.lr
        options = replace(self, lr=lr, min_lr=lr * LEAST_RATE if self.min_lr is None else self.min_lr)
        if self.full or self.mixers or self.adapts:
            return options
        everything = replace(options, full=True)
        written = _not_written(everything._adaptation(student), student) is None
        return everything if written else replace(options, mixers=True)

    def settings(self, run: RunOptions) -> JsonObject:
        return {**super().settings(run), "top_k": None if self.cache_teacher is None else self.cache_top_k}

    def _adaptation(self, student: Checkpoint) -> Adaptation:
        chosen = self.for_model(student)
        return Adaptation.of(
            student.config,
            student.mixers,
            chosen.lora_targets,
            rank=chosen.lora_rank,
            alpha=chosen.lora_alpha,
            full=chosen.full,
            whole_mixers=chosen.mixers,
            unfreeze=chosen.unfreeze,
        )


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """That the uncut model gets the same training: into which folder, and whether it then teaches."""

    out: str | Path | None = None
    teaches: bool = False

    @classmethod
    def of(cls, control: bool, out: str | Path | None, teaches: bool) -> ControlOptions | None:
        """None where no control is wanted."""
        if out is not None and not (control or teaches):
            raise PlanError("`control_out` is the folder of a control: give `control` or `control_teaches` with it")
        return cls(out=out, teaches=teaches) if control or teaches else None

    @property
    def asked(self) -> str:
        return "control_teaches" if self.teaches else "control"

    def given(self) -> dict[str, object]:
        """As the flags of the command."""
        return {self.asked: True, "control_out": self.out}

    def check(self, options: RecoverOptions) -> None:
        """There is an uncut model; one that is to teach will be learnt from, and has no name yet to keep guesses by."""
        if options.no_teacher:
            raise PlanError(f"`{self.asked}` fine-tunes the uncut model too: give it with `teacher`")
        if self.teaches and not options.kd_weight:
            raise PlanError("`control_teaches` with a `kd_weight` of 0: nothing would be learnt from it")
        if self.teaches and options.cache_teacher is not None:
            raise PlanError(
                "`cache_teacher` keeps the guesses of a teacher that is there: make the control first, then give it as"
                " `teacher`"
            )


PRESETS: Mapping[str, Callable[[], RecoverOptions]] = {"paper": RecoverOptions.paper}


def preset_named(name: str) -> RecoverOptions:
    """The options of a recovery that somebody else has made."""
    if name not in PRESETS:
        raise PlanError(f"unknown `preset` {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]()


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """What changes how a training is run, and not what it gives.

    Parameters:
        grad_accum: pieces in which each batch is worked on.
        save_every: steps between checkpoints; by default about twenty of them.
        report_to: where losses are logged: "tensorboard", "wandb", ..., "none".
        fsdp: shard the model over GPUs.
        keep_adapter: write the adapter too.
        resume: go on from the last whole checkpoint.
        force: replace an output folder that exists, once the new one is whole.

    Examples:
        >>> slimstate.recover("slim", "out", data="text.txt", trainer=slimstate.TrainerOptions(resume=True))
    """

    grad_accum: int = 1
    save_every: int | None = None
    report_to: str = "tensorboard"
    fsdp: bool = False
    keep_adapter: bool = False
    resume: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        at_least("grad_accum", self.grad_accum, 1)
        at_least("save_every", self.save_every, 1)

    @property
    def loggers(self) -> tuple[str, ...]:
        """The names in a comma list of places to log to; `none` is none."""
        return tuple(name for name in map(str.strip, self.report_to.split(",")) if name not in ("", "none"))

    def check(self, options: TrainOptions, run: RunOptions) -> None:
        """This training can be run like this here: its packages, its loggers, its processes."""
        _check_installed(options.packages, self.loggers)
        if options.batch_size % (self.grad_accum * distributed.count()):
            raise PlanError(
                f"`batch_size` {options.batch_size} cannot be split evenly over {distributed.count()} processes"
                f" with `grad_accum` {self.grad_accum}"
            )
        if self.fsdp and not (distributed.launched() and run.place.type == "cuda"):
            raise PlanError("`fsdp` shards a model over GPUs: start one process for each with torchrun")

    def steps_between_saves(self, steps: int) -> int:
        """As given; otherwise there are about twenty checkpoints."""
        return min(self.save_every or max(1, steps // 20), steps)

    def steps_between_logs(self, steps: int) -> int:
        """About two hundred points, such that every checkpoint ends one."""
        saves = self.steps_between_saves(steps)
        return next(size for size in range(min(max(1, steps // 200), saves), 0, -1) if saves % size == 0)


def _not_written(adaptation: Adaptation, student: Checkpoint) -> str | None:
    """The first weight that would be trained and that the student's files keep in another form."""
    return next((name for name in adaptation.weights(student.config) if not student.stored_names(name)), None)


def rate_for(student: Checkpoint) -> float:
    """Found on models up to 512 wide; on wider ones in inverse proportion, as Adam's steps add up over the width."""
    return RATE * min(1.0, WIDTH / student.mixers[0].input_size)


def at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise PlanError(f"`{name}` {value}: it must be at least {least}")


def _check_installed(packages: tuple[str, ...], loggers: tuple[str, ...]) -> None:
    """What training needs is installed, and the Trainer knows where to log to."""
    for name in packages:
        if find_spec(name) is None:
            raise PlanError(f"{name} cannot be imported: pip install 'slimstate[recover]'")
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        get_reporting_integration_callbacks(list(loggers))
    except ValueError as error:
        raise PlanError(f"`report_to` {','.join(loggers)}: {error}") from error
    for name in loggers:
        if find_spec(name) is None:
            cure = "'slimstate[recover]'" if name == "tensorboard" else name
            raise PlanError(f"{name} cannot be imported: pip install {cure}, or `report_to` none")
