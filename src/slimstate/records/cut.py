"""Records around a cut: what a model is, what a cut changes, how long it will take."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from slimstate.core.selection import Selection
from slimstate.records.base import Record
from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.numbers import format_mib, plural
from slimstate.records.parts import Cut
from slimstate.records.plan import CutFacts, Plan
from slimstate.records.schema import IN_MEMORY, Value
from slimstate.records.serving import Gain, LayerSpeed
from slimstate.records.training import ReconstructionRecord


class CutRecord(Record, CutFacts):
    """What a cut changes; `out` is the folder of the cut model, or None."""

    KIND = "cut"

    model: str
    compression: float
    noncommuting: tuple[str, ...] | None  # what does not commute with a rotation; None for a cut by channels
    state_bytes: Mapping[str, Mapping[str, int]]  # per sequence, "before" and "after", by precision
    parameters: Mapping[str, int]
    dequantised: str | None = None  # which quantised weights became bfloat16, and what that costs
    speed: LayerSpeed | None = None
    certificate: Mapping[str, float | None]
    kernels: str | None
    out: str | None
    left_out: tuple[str, ...] = ()
    seconds: float
    reconstruction: ReconstructionRecord | None = None
    evaluation: EvaluationRecord | None = None
    plan: Plan = field(metadata=IN_MEMORY, repr=False)
    cut_model: Any = field(default=None, metadata=IN_MEMORY, repr=False, compare=False)  # of a model in memory

    def headline(self) -> str:
        keys = f"{self.method}: key dim {self.width} to {self.key_dim}"
        values = f"{self.value_method}: value dim {self.value_width} to {self.value_dim}"
        cuts = [keys] * (self.key_dim < self.width or self.value_dim is None) + [values] * (self.value_dim is not None)
        before, after = (format_mib(sizes["fp32"]) for sizes in (self.state_bytes["before"], self.state_bytes["after"]))
        counts = f"{self.parameters['before']:,} to {self.parameters['after']:,} parameters"
        return f"{', '.join(cuts)}; state per sequence {before} to {after} in fp32; {counts}"

    def table(self) -> list[dict[str, object]]:
        """Return a row for every head: the uncut head it is from, its channels unless a basis, and its certificate."""
        rows: list[dict[str, object]] = []
        for layer, choice in self.plan.selections.items():
            for head in range(choice.heads):
                channels = choice.keep[head].tolist() if isinstance(choice, Selection) else None
                origin = head if choice.origins is None else int(choice.origins[head])
                claims = {name: values[head] for name, values in choice.certificate.items()}
                rows.append({"layer": layer, "head": head, "origin": origin, "keep": channels, **claims})
        return rows


class DeviceSpeed(Value):
    flops_per_second: float
    read_bytes_per_second: float


class EstimateRecord(Record):
    """The time and memory that every stage of a cut will take."""

    KIND = "estimate"

    model: str
    method: str
    key_dim: int
    value_dim: int | None = None
    speed: LayerSpeed | None = None
    device: str
    dtype: str
    tokens: int
    measured: DeviceSpeed
    seconds: Mapping[str, float]
    gpu_bytes: Mapping[str, float]
    host_bytes: Mapping[str, float]
    disk_bytes: int

    def headline(self) -> str:
        values = "" if self.value_dim is None else f" and value dim {self.value_dim}"
        return f"{self.method} to key dim {self.key_dim}{values} of {self.model} on {self.device}: about"

    def table(self) -> list[dict[str, object]]:
        """Return a row for every stage."""
        return [{"stage": stage, "seconds": seconds} for stage, seconds in self.seconds.items()]


class KeyDimOption(Value):
    """A recommended key dim, and the size of the model with it."""

    key_dim: int
    compression: float
    state_bytes: Mapping[str, int]
    parameters: int | None
    sequences: float  # that fit into the memory of states and KV caches, relative to the uncut model


class BudgetChoice(Value):
    """The key dim that a budget allows, the value dim if values are cut, and why."""

    bytes: float
    dtype: str
    key_dim: int
    value_dim: int | None = None
    why: str


class Serving(Value):
    """Rules for engines, their date and a verdict of each; for one `engine`, also its safe and fast key dims."""

    date: str
    rules: tuple[Mapping[str, Any], ...]
    engine: str | None = None
    safe: tuple[int, ...] | None = None
    fast: tuple[int, ...] | None = None
    verdicts: tuple[str, ...] = ()


class InspectionRecord(Record):
    """The shape of a model and its state, the recommended key dims, and the one that fits a budget."""

    KIND = "inspection"

    model: str
    model_type: str
    mixers: int
    softmax_layers: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    parameters: int | None  # None where they cannot be counted
    state_bytes: Mapping[str, int]
    context: int
    kv_bytes: int | None  # of softmax layers for `context` tokens in bf16, which no cut reduces; None if not known
    already_cut: Cut | None
    serving: Serving
    speed: LayerSpeed | None
    budget: BudgetChoice | None
    options: tuple[KeyDimOption, ...]
    value_dims: tuple[int, ...] = ()  # that the config can express beside any key dim
    sides: str = ""  # what can be cut
    gains: tuple[Gain, ...] = ()

    def headline(self) -> str:
        parameters = "" if self.parameters is None else f", {self.parameters:,} parameters"
        softmax = f", {plural(self.softmax_layers, 'softmax layer')} left alone" if self.softmax_layers else ""
        value_heads = f" and {plural(self.value_heads, 'value head')}" if self.value_heads != self.heads else ""
        dims = f"{plural(self.heads, 'key head')}{value_heads}, key dim {self.key_dim}, value dim {self.value_dim}"
        fp32, bf16 = (format_mib(self.state_bytes[dtype]) for dtype in ("fp32", "bf16"))
        lines = [
            f"{self.model}: {self.model_type}{parameters}",
            f"{plural(self.mixers, 'linear layer')}{softmax}, {dims}",
            f"recurrent state per sequence: {fp32} in fp32, {bf16} in bf16",
        ]
        if self.kv_bytes is None:
            lines.append("the config does not say how large the KV cache is")
        elif self.kv_bytes:
            size = f"{format_mib(self.kv_bytes)} of KV cache at {self.context:,} tokens (bf16), which stays"
            lines.append(f"for each sequence also {size}")
        return "\n".join(lines)

    def table(self) -> list[dict[str, object]]:
        """Return a row for every recommended key dim."""
        return [
            {
                "key_dim": option.key_dim,
                "compression": option.compression,
                "state_mib_fp32": option.state_bytes["fp32"] / 2**20,
                "sequences": option.sequences,
                "parameters": option.parameters,
            }
            for option in self.options
        ]
