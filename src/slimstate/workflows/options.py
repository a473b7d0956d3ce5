"""Configs of the workflows, with every option of a command; they import no torch, so that help appears at once."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from slimstate.data.options import EvalText, TextOptions, TextSource
from slimstate.evaluation.options import GridOptions, MeasureOptions, TraceOptions, full_name
from slimstate.models.options import LoadOptions, RunOptions, parse_limits
from slimstate.pruning.options import Budget, Calibration, CalibrationText, CutOptions
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.serving.options import ComparisonOptions, EngineChoice, EngineOptions, PoolOptions
from slimstate.system.errors import PlanError
from slimstate.system.options import Options, once, options_of
from slimstate.training.options import AdaptationOptions, RecoverOptions, TrainOptions
from slimstate.workflows.inputs import Model

TASK_OPTIONS = ("task_data", "include_path", "limit", "recall_prompts")
# (L634) is a line of the paper's source. The convolutions are always trained whole (L634), as in the released code.
PAPER: Mapping[str, object] = {
    "steps": 2000,  # 32k samples (L634) in batches of 16
    "tokens": None,
    "batch_size": 16,  # L634
    "length": 2048,  # L634
    "lr": 1e-4,  # L634
    "min_lr": 1e-5,  # L634
    "warm_up": 0.05,  # L634
    "weight_decay": 0.1,  # released code
    "second_beta": 0.95,  # released code
    "adam_eps": 1e-15,  # released code
    "lora_rank": 16,  # L634; 32 in the released code
    "lora_alpha": 32,  # L634; 64 in the released code
    "lora_targets": "q_proj,k_proj,v_proj",  # released code
    "unfreeze": "norms,biases",  # released code
    "kd_weight": 1.0,  # released code; the paper distils from the original model (L634) and names no weight
    "temperature": 2.0,  # released code
}
PRESETS = {"paper": PAPER}
IN_MEMORY = ("data", "eval_text", "teacher")  # options that may be objects in place of names


class InspectConfig(EngineChoice):
    """What to show of a model"""

    budget: Budget = Budget()
    pool: PoolOptions = PoolOptions()

    @property
    def counts_pool(self) -> bool:
        return self.engine is not None and self.pool.context is not None

    def check(self) -> None:
        budget = self.budget
        if self.counts_pool:
            if budget.memory_gb is None:
                raise PlanError("`context` with `engine` needs `memory_gb`: GiB for states and caches on each GPU")
            self.refuse(("sequences", "state_mb", "axes"), "has no effect on what fits: leave out `context`")
            return
        alone = self.pool.context is not None and budget.memory_gb is not None and budget.sequences is None
        advice = "is for the memory of a serving engine: give `engine` vllm or sglang, `context` and `memory_gb`"
        self.refuse((name for name in self.pool.to_values() if name != "context" or alone), advice)


class PruneConfig(EngineChoice):
    """How to cut a model"""

    key_dim: int | None = None
    """Key and query channels to keep in every head, exactly."""
    value_dim: Annotated[int | None, Meta(ge=1)] = None
    """Value channels to keep in every head, exactly; default: all. Without a key dim only values are cut."""
    state_dim: Annotated[int | None, Meta(ge=1)] = None
    """Key and value channels to keep, the same number of both, as engines and configs with one width need."""
    compression: float | None = None
    """Share of the key channels to remove, rounded to a key dim that is a multiple of 16; 0.5 removes half."""
    method: Any = "drrqr"
    """{methods}"""
    score: Literal["kq", "k", "q"] = "kq"
    """Choose channels by keys and queries (kq), keys (k) or queries (q)."""
    value_method: Any = None
    """How to choose value channels: energy (largest share of the output), grad, l1 or random; default: energy, or l1
    or random beside these methods."""
    reconstruct: ReconstructOptions | None = None
    """Train each cut layer to match the output of the uncut layer, on the calibration text."""
    distill: Annotated[int | None, Meta(ge=1)] = None
    """Steps of distillation of the whole model after the reconstruction, such as 600; used only if it helps on
    held-out windows."""
    apply: Path | None = None
    """Repeat the cut of this slimstate_plan.json, or of the folder of a cut model; no calibration."""
    same_model: bool = False
    """The plan of `apply` was made on another checkpoint of the same model, such as the unquantised one."""
    force: bool = once()
    """Replace an existing output folder, once the new one is complete."""
    calibration: Calibration = Calibration()
    cut: CutOptions = CutOptions()
    budget: Budget = Budget()
    evaluation: EvalText = EvalText()
    run: LoadOptions = LoadOptions()

    def check(self) -> None:
        self.refuse(("distill", "keep_heads"), "needs `reconstruct`", unless=self.reconstruct is not None)
        if self.apply is not None and self.reconstruct is not None:
            raise PlanError("`apply` repeats a cut; reconstruct it afterwards with slimstate reconstruct")
        self.refuse(("same_model",), "needs `apply`", unless=self.apply is not None)
        if self.reconstruct is not None and self.calibration.data is None:
            raise PlanError("`reconstruct` trains on text: give it with `data`")
        sizes = (self.key_dim, self.compression, self.value_dim, self.state_dim)
        has_size = any(size is not None for size in sizes)
        if self.state_dim is not None and any(size is not None for size in sizes[:3]):
            raise PlanError("`state_dim` is both dims: leave out `key_dim`, `value_dim` and `compression`")
        cuts_values = self.budget.axes in ("values", "both") or (*sizes[2:], self.engine) != (None, None, None)
        self.refuse(("value_method",), "needs `value_dim`, `state_dim` or `axes`", unless=cuts_values)
        groups = (option.name for group in (Calibration, CutOptions) for option in options_of(group))
        names, reason = ("method", "score", "value_method", *groups), "is part of the plan of `apply`: leave it out"
        self.refuse(names, reason, unless=self.apply is None)
        has_budget = self.budget.is_set
        self.refuse(("state_dtype",), "needs a budget: `state_mb`, or `sequences` and `memory_gb`", unless=has_budget)
        self.refuse(("eval_tokens",), "needs `eval_text`", unless=self.evaluation.eval_text is not None)
        if self.apply is not None and (has_size or has_budget):
            raise PlanError(
                "the plan of `apply` says how much is kept: leave out `key_dim`, `value_dim`, `state_dim`,"
                " `compression` and budgets"
            )
        if has_size and has_budget:
            raise PlanError("a budget sets the dims: leave out `compression`, `key_dim`, `value_dim` and `state_dim`")


class ReconstructConfig(TextOptions):
    """How to reconstruct a cut model"""

    data: TextSource = None
    """Text to train on: a .txt, .jsonl or .parquet file (also .gz or .xz), a folder of them, or a datasets name."""
    teacher: Model = None
    """The uncut model; default: the one that the model was cut from."""
    training: ReconstructOptions = ReconstructOptions()
    distill: Annotated[int | None, Meta(ge=1)] = None
    """Steps of distillation of the whole model after the reconstruction, such as 600; used only if it helps on
    held-out windows."""
    max_memory: str | None = None
    """Maximum memory for hidden states by device, such as 0=40GiB,cpu=100GiB; the rest lies on disk."""
    force: bool = once()
    """Replace an existing output folder, once the new one is complete."""
    evaluation: EvalText = EvalText()
    run: RunOptions = RunOptions()

    def check(self) -> None:
        parse_limits(self.max_memory)
        self.refuse(("eval_tokens",), "needs `eval_text`", unless=self.evaluation.eval_text is not None)


class ControlOptions(Options):
    """Control"""

    control: bool = False
    """Also train the uncut model in the same way, into OUT-control, to show how much of the gain is recovery and how
    much is more training. If the model is the uncut one, train only that."""
    control_out: Path | None = None
    """Another folder for the control; a control that was trained with the same settings is used again."""
    control_teaches: bool = False
    """Train the control first, from the text alone, and learn from it in place of the uncut model: for text from which
    the uncut model itself can still learn."""

    def check(self) -> None:
        self.refuse(("control_out",), "needs `control` or `control_teaches`", unless=self.mode is not None)

    @property
    def mode(self) -> str | None:
        """The option that selects a control, or None."""
        return "control_teaches" if self.control_teaches else "control" if self.control else None


class RecoverConfig(RecoverOptions):
    """How to recover a cut model"""

    preset: Literal["paper"] | None = once(None)
    """paper: the recovery that the paper describes for DeltaNet and Gated DeltaNet; where its text says nothing, what
    its released code does (adapters on q, k and v, norms and biases trained too). Explicit options override the
    preset."""
    comparison: ControlOptions = ControlOptions()

    def check(self) -> None:
        super().check()
        mode, distillation = self.comparison.mode, self.distillation
        if mode is not None and distillation.no_teacher:
            raise PlanError(f"`{mode}` trains the uncut model too: give it with `teacher`")
        if mode == "control_teaches" and not distillation.kd_weight:
            raise PlanError("`control_teaches` needs a `kd_weight` above 0")
        if mode == "control_teaches" and distillation.cache_teacher is not None:
            raise PlanError("`cache_teacher` needs a teacher that exists: train the control first, as `teacher`")
        if self.preset is not None:  # options that differ from their defaults override it
            values = {name: value for name, value in self.to_values().items() if name not in IN_MEMORY}
            config = self.from_values({**values, "preset": self.preset}, replace(self, preset=None))
            for item in fields(self):
                object.__setattr__(self, item.name, getattr(config, item.name))

    @classmethod
    def from_values(cls, values: Mapping[str, object], base: "RecoverConfig | None" = None) -> "RecoverConfig":
        """Return the config with these values, and those of the preset or of `base` for the rest."""
        values = dict(values)
        if (preset := values.pop("preset", None)) is not None:
            if preset not in PRESETS:
                raise PlanError(f"unknown `preset` {preset!r}; there are {', '.join(PRESETS)}")
            for name in ("full", "mixers", "no_teacher", "control_teaches"):
                if values.get(name):
                    trained = "adapters, from the uncut model"
                    raise PlanError(f"`preset` {preset} trains {trained}, and `{name}` contradicts it: leave out one")
            base = super().from_values(PRESETS[preset], base)
        if values.get("tokens") is not None:
            values = {"steps": None, **values}
        if values.get("full") or values.get("mixers"):
            values = {**vars(AdaptationOptions()), **values}
        elif "lora_rank" in values or "lora_alpha" in values:
            values = {"lora": True, **values}
        try:
            return super().from_values(values, base)
        except PlanError as error:
            raise PlanError(f"with `preset` {preset}, {error}" if preset is not None else str(error)) from error


class TrainConfig(TrainOptions):
    """How to train a model"""

    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; default: one that is trained on the text."""
    shared_filters: Literal["head", "all"] | None = None
    """One convolution filter for every head (head), or one for all of them (all)."""


class EvalConfig(TextOptions):
    """What to measure of a model"""

    length: Annotated[int, Meta(ge=2)] = 1024
    """Tokens per window of the text."""
    recall: bool = False
    """Run the six recall tasks: DROP, FDA, NQ, SQuAD, SWDE, TriviaQA. How their prompts differ from those of
    prefix-linear-attention: docs/EXPERIMENTS.md."""
    associative: bool = False
    """Also measure recall of random pairs placed in --text; needs no download."""
    baseline: Model | None = None
    """A second model to compare with, such as the uncut one."""
    state_dtype: str = "float32"
    """Data type that states are stored in between steps, as in an engine: float32, bfloat16 or float8_e4m3. A baseline
    stores float32."""
    measures: MeasureOptions = MeasureOptions()
    run: RunOptions = RunOptions()

    def check(self) -> None:
        object.__setattr__(self, "state_dtype", full_name(self.state_dtype))
        has_tasks, is_rounded = bool(self.measures.tasks or self.recall), self.state_dtype != "float32"
        self.refuse(TASK_OPTIONS, "needs `tasks` or `recall`", unless=has_tasks)
        self.refuse(("seed",), "needs `associative`, `tasks` or `recall`", unless=has_tasks or self.associative)
        self.refuse(("state_every",), "needs another `state_dtype` than float32", unless=is_rounded)


class AnalyzeConfig(TraceOptions):
    """How to follow the states of models"""

    head: str | None = None
    """LAYER:HEAD whose spectra are drawn; default: a typical one."""
    force: bool = once()
    """Replace the records of these models in the output folder."""
    run: RunOptions = RunOptions()


class SweepConfig(Options):
    """What to sweep, and what to measure it on"""

    text: TextSource = None
    """Text to predict: a .txt, .jsonl or .parquet file (also .gz or .xz), a folder of them, or a datasets name."""
    text_length: Annotated[int, Meta(ge=2)] = 1024
    """Tokens per window of --text."""
    max_loss: Annotated[float, Meta(ge=0)] = 0.1
    """Nats per token that a recommended cut may cost."""
    recall: Annotated[int | None, Meta(ge=0)] = None
    """Sequences of associative recall, as --associative of eval has 8, for each number of pairs (more where these ask
    fewer than 64 questions); 0: none; default: 8 if --text has as many tokens as these."""
    reconstruct: ReconstructOptions | None = None
    """Measure every cut after a reconstruction on --data."""
    grid: GridOptions = GridOptions()
    calibration: CalibrationText = CalibrationText()
    cut: CutOptions = CutOptions()
    measures: MeasureOptions = MeasureOptions()
    run: RunOptions = RunOptions()

    def check(self) -> None:
        if getattr(self.calibration, "evidence", None) is not None:
            raise PlanError("a sweep keeps its evidence in `out`: leave out `evidence`")
        if self.reconstruct is not None and self.calibration.data is None:
            raise PlanError("`reconstruct` trains on text: give it with `data`")
        grid, is_rounded = self.grid, {*self.grid.state_dtypes} != {"float32"}
        self.refuse(("samples", "length", "rrqr_rows"), "needs `data`", unless=self.calibration.data is not None)
        self.refuse(TASK_OPTIONS, "needs `tasks`", unless=bool(self.measures.tasks))
        self.refuse(("keep_heads",), "needs `reconstruct`", unless=self.reconstruct is not None)
        self.refuse(("value_method",), "needs `value_dims`", unless=bool(grid.value_dims))
        self.refuse(("state_every",), "needs another of `state_dtypes` than float32", unless=is_rounded)


class VerifyRunOptions(RunOptions):
    """Where the model runs"""

    dtype: Literal["float32", "bfloat16", "float16"] | None = "float32"
    """Data type that both compute in: float32, bfloat16 or float16."""


class VerifyConfig(EngineOptions):
    """How to compare an engine with transformers"""

    against: str | None = None
    """The uncut model to run as well, to see whether the engine differs without the cut, too."""
    masked: bool = False
    """Compare the cut with `against`, its dropped channels zeroed, in the engine alone: what differs is then the cut,
    not the quantisation of both."""
    plan: Path | None = None
    """With `masked`: the plan of the cut, or the folder of a cut model; default: the one in the folder."""
    comparison: ComparisonOptions = ComparisonOptions()
    run: VerifyRunOptions = VerifyRunOptions()

    def check(self) -> None:
        super().check()
        if self.engine is None:
            raise PlanError("give `engine`: transformers, mlx, llama.cpp, vllm or sglang")
        if self.masked and self.against is None:
            raise PlanError("`masked` needs the uncut model: give it with `against`")
        self.refuse(("plan",), "needs `masked`", unless=self.masked)
