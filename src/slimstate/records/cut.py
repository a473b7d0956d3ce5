"""What the verbs around a cut find: what a model is, what a cut changes, how long one will take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slimstate.core.selection import Selection
from slimstate.records.base import Record
from slimstate.records.parts import Cut, Text
from slimstate.records.plan import Plan
from slimstate.records.reconstruction import ReconstructionRecord
from slimstate.records.schema import IN_MEMORY
from slimstate.records.speed import SpeedOfCut, SpeedsBelow


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of recurrent state per sequence, by the precision an engine keeps it in."""

    before: Mapping[str, int]
    after: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Parameters:
    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class CutRecord(Record):
    """What a cut changes, in numbers; `out` is its folder, None where nothing was written.

    `noncommuting` names what a rotation of the channels does not commute with; it is None of a cut by channels. `plan`
    has the kept channels, `plan.selections[layer].keep` [heads, key dim]. `cut_model` is the model itself where one in
    memory was cut and not written; both are no part of the JSON.
    """

    KIND: ClassVar[str] = "cut"

    model: str
    model_type: str
    method: str
    score: str
    width: int
    key_dim: int
    compression: float
    corrected: bool
    noncommuting: tuple[str, ...] | None
    correction: str
    state_bytes: StateBytes
    parameters: Parameters
    speed: SpeedOfCut | None = None
    calibration: Text | None
    certificate: Mapping[str, float | None]
    versions: Mapping[str, str]
    kernels: str | None
    out: str | None
    left_out: tuple[str, ...] = ()
    seconds: float
    reconstruction: ReconstructionRecord | None = None
    plan: Plan = field(metadata=IN_MEMORY, repr=False)
    cut_model: Any = field(default=None, metadata=IN_MEMORY, repr=False, compare=False)

    def headline(self) -> str:
        lines = [f"{self.method}: key dim {self.width} to {self.key_dim} in every head of {self.model_type}"]
        sizes = (self.state_bytes.before["fp32"], self.state_bytes.after["fp32"])
        lines.append(f"state per sequence (fp32): {_mebibytes(sizes[0])} to {_mebibytes(sizes[1])}")
        lines.append(f"parameters: {self.parameters.before:,} to {self.parameters.after:,}")
        return "\n".join([*lines, *([self.correction] if self.correction else ())])

    def table(self) -> list[dict[str, object]]:
        """One for every head: the channels it keeps, where they are channels, and what the method certifies of it."""
        found: list[dict[str, object]] = []
        for layer, choice in self.plan.selections.items():
            kept = choice.keep.tolist() if isinstance(choice, Selection) else [None] * choice.rows.shape[0]
            for head, channels in enumerate(kept):
                claims = {name: values[head] for name, values in choice.certificate.items()}
                found.append({"layer": layer, "head": head, "kept": channels, **claims})
        return found


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    flops_per_second: float
    read_bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class EstimateRecord(Record):
    """Seconds and bytes of every stage of a cut that was not made."""

    KIND: ClassVar[str] = "estimate"

    model: str
    method: str
    key_dim: int
    speed: SpeedOfCut | None = None
    device: str
    dtype: str
    tokens: int
    measured: DeviceSpeed
    seconds: Mapping[str, float]
    gpu_bytes: Mapping[str, float]
    host_bytes: Mapping[str, float]
    disk_bytes: int

    def headline(self) -> str:
        return f"{self.method} to key dim {self.key_dim} of {self.model} on {self.device}: about"

    def table(self) -> list[dict[str, object]]:
        """One for every stage."""
        return [{"stage": stage, "seconds": seconds} for stage, seconds in self.seconds.items()]


@dataclass(frozen=True, kw_only=True)
class KeyDimOption:
    """A key dim worth choosing, and what the model is then."""

    key_dim: int
    compression: float
    state_bytes: Mapping[str, int]
    parameters: int | None
    sequences: float  # times as many that fit in the memory of states and KV caches


@dataclass(frozen=True, kw_only=True)
class FittingKeyDim:
    """The key dim that a budget chooses, and why."""

    bytes: float
    dtype: str
    key_dim: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What is known of engines, and since when; of one `engine`, also which key dims are safe and fast there."""

    date: str
    rules: tuple[Mapping[str, Any], ...]
    engine: str | None = None
    safe: tuple[int, ...] | None = None
    fast: tuple[int, ...] | None = None
    advice: str | None = None


@dataclass(frozen=True, kw_only=True)
class InspectionRecord(Record):
    """The shape of a model and its state, the key dims worth choosing, and the one that fits a budget.

    `kv_bytes` is what the softmax layers keep of a sequence of `context` tokens in bf16, which no cut makes smaller:
    0 where there are none, None where the config does not say. `parameters` is None where only the config is known, and
    the library of the model is not there to count them.
    """

    KIND: ClassVar[str] = "inspection"

    model: str
    model_type: str
    mixers: int
    softmax_layers: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    parameters: int | None
    state_bytes: Mapping[str, int]
    context: int
    kv_bytes: int | None
    already_cut: Cut | None
    serving: Serving
    speed: SpeedsBelow | None
    budget: FittingKeyDim | None
    options: tuple[KeyDimOption, ...]

    def headline(self) -> str:
        dims = f"{self.heads} heads, key dim {self.key_dim}, value dim {self.value_dim}"
        return (
            f"{self.model}: {self.model_type}{self.counted}\n"
            f"{self.mixers} linear layers{self.left_alone}, {dims}\n"
            f"recurrent state per sequence: {_mebibytes(self.state_bytes['fp32'])} in fp32{self.cached}"
        )

    @property
    def left_alone(self) -> str:
        several = "s" * (self.softmax_layers > 1)
        return f", {self.softmax_layers} softmax layer{several} left alone" if self.softmax_layers else ""

    @property
    def counted(self) -> str:
        return "" if self.parameters is None else f", {self.parameters:,} parameters"

    @property
    def cached(self) -> str:
        """What the softmax layers keep beside the state, as the end of a line."""
        if self.kv_bytes is None:
            return "; the config does not say how large the KV cache is"
        size = f"{_mebibytes(self.kv_bytes)} of KV cache at {self.context:,} tokens (bf16), which stays"
        return f", and {size}" if self.kv_bytes else ""

    def table(self) -> list[dict[str, object]]:
        """One for every key dim worth choosing."""
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


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:,.2f} MiB"
