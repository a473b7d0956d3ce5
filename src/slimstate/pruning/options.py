"""Options of a cut: the text it is calibrated on, how channels are chosen, and how much memory the state may take."""

import math
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from slimstate.data.options import TextOptions, TextSource
from slimstate.records.numbers import plural
from slimstate.system.errors import PlanError
from slimstate.system.options import Options

SAMPLES, LENGTH = 128, 2048
STATE_BYTES = {"fp32": 4, "bf16": 2}
LONG_NAMES = {"float32": "fp32", "bfloat16": "bf16"}
MIB, GIB = 2**20, 2**30


class CalibrationText(TextOptions):
    """Calibration"""

    data: TextSource = None
    """Text to calibrate on: a .txt, .jsonl or .parquet file (also .gz or .xz), a folder of them, or a datasets name."""
    samples: Annotated[int | None, Meta(ge=1)] = None
    """Calibration windows; default: 128, or as many as the text has."""
    length: Annotated[int | None, Meta(ge=2)] = None
    """Tokens per calibration window; default: 2048, or fewer where the text is shorter."""
    rrqr_rows: Annotated[int | None, Meta(ge=1)] = None
    """Keys and queries per head that drrqr sees, drawn at random from the calibration (the paper's code: 5000);
    default: all."""

    @property
    def size(self) -> tuple[int, int]:
        """Windows, and tokens per window, where the text has enough."""
        return SAMPLES if self.samples is None else self.samples, LENGTH if self.length is None else self.length

    @property
    def tokens(self) -> int:
        return math.prod(self.size)


class Calibration(CalibrationText):
    """Calibration"""

    evidence: Path | None = None
    """File that keeps the results of the calibration; where it exists, they are read and the model does not run."""


class CutOptions(Options):
    """Choice of channels"""

    rrqr_f: Annotated[float, Meta(ge=1)] = 1.5
    """Swap threshold f of strong RRQR (drrqr), at least 1."""
    rrqr_swaps: Annotated[int | None, Meta(ge=0)] = None
    """Maximum swaps of strong RRQR per head (the paper's code: 20); default: until none exceeds f."""
    keep_norm_eps: bool = False
    """Leave the norm epsilon as it is, although the key dim sets the query scale; the cut is then not exact."""
    keep_heads: bool = False
    """Keep all heads of a reconstructed cut; default: a head that loses most takes the places of heads that can go."""


class Budget(Options):
    """Memory budget"""

    state_mb: Annotated[float | None, Meta(gt=0)] = None
    """MiB of recurrent state per sequence; the largest key dim that fits is chosen, or what `axes` says."""
    sequences: Annotated[int | None, Meta(ge=1)] = None
    """Sequences that must fit into `memory_gb` at once."""
    memory_gb: Annotated[float | None, Meta(gt=0)] = None
    """GiB for the states of all `sequences`."""
    state_dtype: str | None = None
    """Data type of states in the engine: fp32 or bf16; default: fp32; with --context, what the engine uses."""
    axes: Literal["keys", "values", "both"] | None = None
    """What a budget cuts: keys, values, or both, to the key and value dim with the least predicted loss; default: keys,
    or values where keys cannot be cut."""

    def check(self) -> None:
        if self.state_dtype is not None:
            name = LONG_NAMES.get(self.state_dtype, self.state_dtype)
            if name not in STATE_BYTES:
                raise PlanError(f"unknown `state_dtype` {self.state_dtype}; there are {', '.join(STATE_BYTES)}")
            object.__setattr__(self, "state_dtype", name)
        if self.state_mb is not None and (self.sequences or self.memory_gb):
            raise PlanError("a budget is either `state_mb` for one sequence, or `sequences` and `memory_gb` together")
        is_set = self.state_mb is not None or self.sequences is not None
        self.refuse(("axes",), "needs a budget: `state_mb`, or `sequences` and `memory_gb`", unless=is_set)

    @property
    def is_set(self) -> bool:
        if self.state_mb is None and (self.sequences is None) != (self.memory_gb is None):
            raise PlanError("a budget is either `state_mb` for one sequence, or `sequences` and `memory_gb` together")
        return self.state_mb is not None or self.sequences is not None

    @property
    def dtype(self) -> str:
        return self.state_dtype or "fp32"

    @property
    def bytes(self) -> float:
        """Bytes of state per sequence."""
        if self.state_mb is not None:
            return self.state_mb * MIB
        return (self.memory_gb or 0.0) * GIB / (self.sequences or 1)

    def describe(self) -> str:
        each = f"{self.bytes / MIB:.4g} MiB per sequence in {self.dtype}"
        if self.sequences is None:
            return each
        return f"{self.memory_gb:g} GiB for {plural(self.sequences, 'sequence')}, {each}"
