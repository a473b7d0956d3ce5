"""Options of a training: its text, what decides its result, and how it runs.

An interrupted training can be resumed with other `TrainerOptions`; all others must be the same.
"""

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from slimstate.data.options import EvalText, TextOptions, TextSource
from slimstate.models.options import RunOptions
from slimstate.records.training import TrainSettings
from slimstate.system import distributed
from slimstate.system.errors import PlanError
from slimstate.system.json_files import JsonObject
from slimstate.system.options import Options, once, options_of

RANK, ALPHA = 16, 32  # of adapters
UNFREEZABLE = ("norms", "biases")
Count = Annotated[int | None, Meta(ge=1)]
Rate = Annotated[float | None, Meta(gt=0)]
FinalRate = Annotated[float | None, Meta(ge=0)]


class TrainingText(EvalText, TextOptions):
    """Text"""

    data: TextSource = None
    """Text to train on: a .txt, .jsonl or .parquet file (also .gz or .xz), a folder of them, or a datasets name."""
    eval_text: TextSource = None
    """Text to measure on; default: windows of the training text that are held out."""
    eval_tokens: Annotated[int | None, Meta(ge=2)] = None
    """Measure on this many tokens: the first of `eval_text`, or whole windows that are held out of the training text;
    default: all of `eval_text`, or a window for every 64 of the training, 64 at most."""
    no_repeat: bool = False
    """Refuse to train on the same text more than once."""


class AdaptationOptions(Options):
    """What is trained"""

    full: bool = False
    """Train all weights: the default, except for models whose files store some of them, such as experts, in another
    form."""
    mixers: bool = False
    """Train the mixers whole, and nothing else."""
    lora: bool = False
    """Train low-rank adapters and the convolutions: needs the least memory, recovers less."""
    lora_targets: str | None = None
    """Linear layers that get an adapter: endings of their names, separated by commas, or all-linear; default: all
    projections of the linear-attention layers."""
    lora_rank: Annotated[int, Meta(ge=1)] = RANK
    """Rank of the adapters."""
    lora_alpha: Annotated[int, Meta(ge=1)] = ALPHA
    """Scale of the adapters, divided by their rank."""
    unfreeze: str | None = None
    """Also train the norms, the biases, or both (norms,biases) of the whole model."""
    keep_adapter: bool = False
    """Also write the adapter, for PEFT, to OUT/adapter."""

    def check(self) -> None:
        if self.full + self.mixers + self.lora > 1:
            raise PlanError("give only one of `full`, `mixers` and `lora`")
        trained, names = "full" if self.full else "mixers", ("lora_targets", "lora_rank", "lora_alpha", "unfreeze")
        self.refuse(names, f"has no effect: `{trained}` trains no adapters", unless=not (self.full or self.mixers))
        if self.unfreeze is not None and not {*self.unfrozen_kinds} <= {*UNFREEZABLE}:
            raise PlanError(f"`unfreeze` must be {' or '.join(UNFREEZABLE)}, or both, got {self.unfreeze!r}")

    @property
    def unfrozen_kinds(self) -> tuple[str, ...]:
        return () if self.unfreeze is None else tuple(kind.strip() for kind in self.unfreeze.split(","))

    @property
    def has_adapters(self) -> bool:
        """Whether an option of adapters is set."""
        sized = (self.lora_rank, self.lora_alpha) != (RANK, ALPHA)
        return self.lora or sized or self.lora_targets is not None or self.unfreeze is not None

    @property
    def is_set(self) -> bool:
        return self.full or self.mixers or self.has_adapters


class TeacherOptions(Options):
    """Teacher"""

    teacher: Any = None
    """The uncut model to learn from; default: the one that the model was cut from."""
    no_teacher: bool = False
    """Learn from the text alone."""
    kd_weight: Annotated[float, Meta(ge=0)] = 4.0
    """Weight of the distillation loss beside the cross entropy."""
    temperature: Annotated[float, Meta(gt=0)] = 2.0
    """Temperature of the distillation."""
    cache_teacher: Path | None = None
    """Folder for the most likely tokens of the teacher, shared by this and other recoveries."""
    cache_top_k: Annotated[int, Meta(ge=1)] = 64
    """Tokens to store there for each position."""

    def check(self) -> None:
        if self.no_teacher and self.teacher is not None:
            raise PlanError("give either `teacher` or `no_teacher`")
        names = ("kd_weight", "temperature", "cache_teacher")
        self.refuse(names, "needs a teacher: leave out `no_teacher`", unless=not self.no_teacher)
        self.refuse(("cache_top_k",), "needs `cache_teacher`", unless=self.cache_teacher is not None)


class TrainerOptions(Options):
    """How the training runs"""

    grad_accum: Count = None
    """Split each batch into this many parts, which needs less memory and changes nothing else; default: as few as fit
    into the memory of a GPU, on a CPU parts of about 2048 tokens."""
    save_every: Count = None
    """Steps between checkpoints; default: a twentieth of all steps."""
    report_to: str = "tensorboard"
    """Where the Trainer logs: tensorboard, wandb or others that it knows, separated by commas, or none."""
    fsdp: bool = False
    """Shard the model over the processes (FSDP)."""
    resume: bool = once()
    """Continue an interrupted run from its last complete checkpoint."""
    force: bool = once()
    """Replace an existing output folder, once the new one is complete, and an unfinished run."""

    @property
    def loggers(self) -> list[str]:
        """The loggers that `report_to` names; `none` is none."""
        return [name for name in map(str.strip, self.report_to.split(",")) if name not in ("", "none")]


class TrainOptions(Options):
    """Options of any training."""

    DEFAULT_STEPS: ClassVar[int] = 4000
    WAY_OUT: ClassVar[str] = "choose a config without it, such as one whose layers have no experts"

    steps: Count = None
    """Optimizer steps; default: 4000."""
    tokens: Count = None
    """Train on this many tokens, in place of `steps`."""
    length: Annotated[int, Meta(ge=2)] = 1024
    """Tokens per window."""
    batch_size: Annotated[int, Meta(ge=1)] = 64
    """Windows per step, over all processes."""
    lr: Rate = 3e-3
    """Highest learning rate."""
    min_lr: FinalRate = 3e-4
    """Learning rate at the end of the cosine."""
    warm_up: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the steps in which the learning rate rises."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Weight decay of AdamW."""
    second_beta: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """Second beta of AdamW."""
    adam_eps: Annotated[float, Meta(gt=0)] = 1e-8
    """Epsilon of AdamW."""
    text: TrainingText = TrainingText()
    trainer: TrainerOptions = TrainerOptions()
    run: RunOptions = RunOptions()

    def check(self) -> None:
        if self.steps is not None and self.tokens is not None:
            raise PlanError("give either `steps` or `tokens`")
        if self.tokens is not None and self.tokens < self.tokens_per_step:
            raise PlanError(f"`tokens` must be at least the {self.tokens_per_step} of one step, got {self.tokens}")
        if self.lr is not None and self.min_lr is not None and self.min_lr > self.lr:
            raise PlanError(f"`min_lr` must be at most the learning rate {self.lr:g}, got {self.min_lr:g}")

    @property
    def adaptation(self) -> AdaptationOptions:
        """Which weights are trained."""
        return AdaptationOptions(full=True)

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
    def windows_at_once(self) -> int:
        """The most windows of a process that run at once; on a CPU more of them take more memory and no less time."""
        windows = max(1, self.batch_size // distributed.count())
        if self.trainer.grad_accum is not None or self.run.place.type != "cpu":
            return windows // (self.trainer.grad_accum or 1)
        from slimstate.models.devices import TOKENS_AT_ONCE

        return min(windows, max(1, TOKENS_AT_ONCE["cpu"] // self.length))

    @property
    def samples(self) -> int:
        return self.total_steps * self.batch_size

    @property
    def steps_between_saves(self) -> int:
        return min(self.trainer.save_every or max(1, self.total_steps // 20), self.total_steps)

    @property
    def steps_between_logs(self) -> int:
        """A divisor of the steps between checkpoints that gives about two hundred entries."""
        saves = self.steps_between_saves
        return next(size for size in range(min(max(1, self.total_steps // 200), saves), 0, -1) if saves % size == 0)

    def settings(self) -> JsonObject:
        """Return all options that decide the result, by the names that they have in records."""
        if self.run.precision_name == "float16":
            raise PlanError("`dtype` must be bfloat16 or float32: training in float16 loses gradients")
        names = {item.name for item in fields(TrainSettings)}
        values = {option.name: option.value_in(self) for option in options_of(type(self)) if option.name in names}
        return {**values, "steps": self.total_steps, "dtype": self.run.precision_name}

    def check_environment(self) -> None:
        """Raise a `PlanError` where packages are missing or the batch cannot be split over the processes."""
        from transformers.integrations import get_reporting_integration_callbacks

        trainer, processes, extra = self.trainer, distributed.count(), "'slimstate[recover]'"
        packages = {"accelerate": extra, **({"peft": extra} if self.adaptation.has_adapters else {})}
        hints = {name: f"{extra if name == 'tensorboard' else name}, or `report_to` none" for name in trainer.loggers}
        try:
            get_reporting_integration_callbacks(trainer.loggers)
        except ValueError as error:
            raise PlanError(f"`report_to` {','.join(trainer.loggers)}: {error}") from error
        for name, hint in (packages | hints).items():
            if find_spec(name) is None:
                raise PlanError(f"{name} cannot be imported: pip install {hint}")
        parts = trainer.grad_accum or 1
        if self.batch_size % (parts * processes):
            raise PlanError(
                f"`batch_size` must be a multiple of {processes} processes x {parts} parts (`grad_accum`),"
                f" got {self.batch_size}"
            )
        if trainer.fsdp and not (distributed.is_launched() and self.run.place.type == "cuda"):
            raise PlanError("`fsdp` shards a model over GPUs: start one process for each with torchrun")


class RecoverOptions(TrainOptions):
    """Options of a recovery."""

    DEFAULT_STEPS: ClassVar[int] = 2000
    WAY_OUT: ClassVar[str] = "leave out `full` and `unfreeze`, or choose `lora_targets` without it"

    steps: Count = None
    """Optimizer steps; default: 2000."""
    length: Annotated[int, Meta(ge=2)] = 2048
    batch_size: Annotated[int, Meta(ge=1)] = 16
    lr: Rate = None
    """Highest learning rate; default: 5e-4 for models up to 512 wide, and less for wider ones."""
    min_lr: FinalRate = None
    """Learning rate at the end of the cosine; default: a twentieth of the highest."""
    second_beta: Annotated[float, Meta(ge=0, lt=1)] = 0.999
    adaptation: AdaptationOptions = AdaptationOptions()
    distillation: TeacherOptions = TeacherOptions()

    def settings(self) -> JsonObject:
        top_k = None if self.distillation.cache_teacher is None else self.distillation.cache_top_k
        return {**super().settings(), "top_k": top_k}
