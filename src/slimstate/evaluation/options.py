"""Options of evaluations, analyses and sweeps."""

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from slimstate.data.options import TextOptions
from slimstate.system.errors import PlanError
from slimstate.system.options import Options

FULL_NAMES = {"fp32": "float32", "bf16": "bfloat16"}


class TaskOptions(Options):
    """Tasks"""

    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval or YAML files of tasks, separated by commas; paper: the seven tasks of the paper."""
    include_path: Path | None = None
    """Folder with YAML files of more tasks, as in lm-eval."""
    task_data: Path | None = None
    """Folder with TASK.jsonl or TASK.parquet to use instead of hub datasets."""
    limit: Annotated[int | None, Meta(ge=1)] = None
    """Documents per task; default: all."""
    max_length: Annotated[int | None, Meta(ge=2)] = None
    """Maximum context of tasks in tokens; default: that of the model's config (the paper's code: 10000)."""
    recall_prompts: Literal["full", "harness"] = "full"
    """How recall prompts are truncated: full (2048 tokens with the question), or harness (as prefix-linear-attention:
    1998 tokens of the document, at most half of them before the answer, and no BOS)."""


class MeasureOptions(TaskOptions):
    """Measures"""

    max_tokens: Annotated[int | None, Meta(ge=2)] = None
    """Use only this many tokens, from the beginning of the text."""
    state_every: Annotated[int, Meta(ge=1)] = 1
    """Tokens after which a state is stored: 1 as engines decode, more as they prefill in pieces."""


class GridOptions(Options):
    """Candidates"""

    methods: tuple[Any, ...] | None = None
    """Methods, separated by commas; default: {channel_methods}."""
    compressions: tuple[float, ...] | None = None
    """Shares of key channels to remove, rounded to multiples of 16; default, without --key-dims: 0.3,0.4,0.5,0.75."""
    key_dims: tuple[int, ...] = ()
    """Channels per head to keep, exactly, such as 89,76."""
    value_dims: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    """Value channels per head to keep beside every key dim, such as 96,64; default: all. Key dims may then be whole."""
    value_method: str = "energy"
    """How to choose value channels: energy, grad, l1 or random."""
    scores: tuple[Literal["kq", "k", "q"], ...] = ("kq",)
    """Choose channels by keys and queries (kq), keys (k) or queries (q)."""
    state_dtypes: tuple[str, ...] = ("float32",)
    """Data types to store states in, separated by commas: float32, bfloat16 or float8_e4m3."""

    def check(self) -> None:
        object.__setattr__(self, "state_dtypes", tuple(map(full_name, self.state_dtypes)))


class TraceOptions(TextOptions):
    """States"""

    length: Annotated[int, Meta(ge=2)] = 1024
    """Tokens over which the states are traced."""
    samples: Annotated[int, Meta(ge=1)] = 1
    """Texts of that length to average over."""
    every: Annotated[int, Meta(ge=1)] = 16
    """Tokens between two measurements of the states."""
    skip: Annotated[int, Meta(ge=0)] = 128
    """First tokens that spectra and maps leave out."""

    def check(self) -> None:
        check_times(self.length, self.every, self.skip)


def full_name(state_dtype: str) -> str:
    """Return the full name of a data type that may be abbreviated, such as bf16."""
    return FULL_NAMES.get(state_dtype, state_dtype)


def check_times(length: int, every: int, skip: int) -> None:
    """Raise a `PlanError` if `every` or `skip` leaves no state to measure."""
    if not 1 <= every <= length:
        raise PlanError(f"`every` must be at least 1 and at most the length {length}, got {every}")
    if not 0 <= skip < length // every * every:
        raise PlanError(f"`skip` must be at least 0 and less than the {length} tokens of a text, got {skip}")
