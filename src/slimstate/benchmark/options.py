"""Options of the benchmarks: what is timed, how often, and where."""

import re
from dataclasses import fields
from typing import Annotated, Literal

from msgspec import Meta

from slimstate.data.options import DocumentOptions
from slimstate.models.options import RunOptions
from slimstate.records.schema import Whole, to_json
from slimstate.system.errors import PlanError, quoted
from slimstate.system.json_files import JsonObject
from slimstate.system.options import Options


def check_dims(item: object) -> int | str:
    """Return a key dim as a number, or a key dim with a value dim as text such as 64x128."""
    if re.fullmatch(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})?", text := str(item)) is None:
        raise PlanError(f"`key_dims` must be numbers such as 64, or pairs such as 64x128, got {quoted(text)}")
    return text if "x" in text else int(text)


def split_dims(dims: int | str) -> tuple[int, int | None]:
    """Return the key dim and the value dim, which is None if it is not named."""
    key_dim, _, value_dim = str(dims).partition("x")
    return int(key_dim), int(value_dim) if value_dim else None


Dims = Annotated[int | str, check_dims]


class BenchConfig(Options):
    """Where a benchmark runs, and how many rounds it times."""

    rounds: Whole = 20
    """Timings to take the median of."""
    run: RunOptions = RunOptions()

    @property
    def settings(self) -> JsonObject:
        """What is timed, as plain data."""
        names = [item.name for item in fields(self) if item.name not in ("rounds", "run", "jobs")]
        return {name: to_json(getattr(self, name)) for name in names}


class ModelsBenchConfig(BenchConfig):
    """Which models are timed at which key dims; their kernels can be compiled before."""

    models: tuple[str, ...] = ()
    """Model folders, config files or names of shipped configs, separated by commas."""
    key_dims: tuple[Dims, ...] | None = None
    """Key dims, or key and value dims such as 64x128, none above a model's own; default: its own key dim, a half and a
    quarter."""
    jobs: Annotated[int, Meta(ge=0)] = 0
    """Processes that compile kernels before they are timed; GPU only."""


class MixerBenchConfig(ModelsBenchConfig):
    """How to time single layers"""

    models: tuple[str, ...] = ("delta_net", "gated_deltanet")
    """Model types, separated by commas."""
    key_dims: tuple[Dims, ...] = (128, 64, 32)
    """Key dims, or key and value dims such as 64x128, compared with those of the largest state."""
    batch: Whole = 32
    """Sequences per batch."""
    length: Whole = 2048
    """Tokens per sequence."""
    hidden: Whole = 2048
    """Hidden size."""
    heads: Whole = 16
    """Number of heads."""
    value_dim: Whole = 128
    """Value dim of each head, where `key_dims` names none."""
    no_gate: bool = False
    """Leave out the output gate of layers that have one, as the paper's code does."""
    modes: tuple[Literal["forward", "train"], ...] = ("forward", "train")
    """forward; train: forward and backward."""


class ModelBenchConfig(ModelsBenchConfig):
    """How to time whole models"""

    models: tuple[str, ...] = ("delta_net-370m",)
    rounds: Whole = 10
    batch: Whole = 8
    """Sequences per batch."""
    length: Whole = 2048
    """Tokens per sequence."""
    modes: tuple[Literal["prefill", "forward", "train"], ...] = ("prefill", "train")
    """prefill: states, and logits of the last token; forward: logits of every token; train: loss, gradient, AdamW."""


class DecodeBenchConfig(ModelsBenchConfig):
    """How to time decoding steps"""

    models: tuple[str, ...] = ("delta_net-1.3b",)
    batches: tuple[Whole, ...] = (1, 4, 16, 64, 256, 1024, 4096)
    """Numbers of sequences to decode together."""


class CalibrateBenchConfig(BenchConfig, DocumentOptions):
    """How to time calibration and selection"""

    model: str = "delta_net-1.3b"
    """A model folder, a config file or the name of a shipped config."""
    rounds: Whole = 3
    methods: tuple[str, ...] = ("drrqr", "s-wanda", "grad")
    """Selection methods, separated by commas."""
    key_dim: Whole | None = None
    """Channels to keep in each head; default: half."""
    samples: Whole = 128
    """Calibration windows."""
    length: Whole = 2048
    """Tokens per calibration window."""
    data: str | None = None
    """Text to calibrate on: a .txt, .jsonl or .parquet file (also .gz or .xz), a folder of them, or a datasets name;
    default: random tokens."""

    def check(self) -> None:
        self.refuse(("documents", "special_tokens"), "needs `data`", unless=self.data is not None)


def title(model: str) -> str:
    """Return the name of an architecture as the paper writes it."""
    return {"delta_net": "DeltaNet", "gated_deltanet": "Gated DeltaNet"}.get(model, model)
