"""Benchmarks: the time of layers, models, kernels and calibration at several key dims.

Times are medians in seconds; a row that could not be measured has an `error`. Speed and memory are relative to the
largest state, key dim times value dim, of the same model, mode and batch that could be measured; in a calibration, to
the forward pass. Where no value dim is recorded, it is the model's own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from slimstate.records.base import Record
from slimstate.records.numbers import dims_text
from slimstate.records.parts import Origin
from slimstate.records.schema import NON_EMPTY, Count, Positive, ValidationError, Value, Whole, from_json

B = TypeVar("B", bound="BenchRecord")
W = TypeVar("W", bound="WidthRow")


class TimedRow(Value):
    """The median time over rounds, its quartiles, and the peak memory on a GPU."""

    LABELS: ClassVar[tuple[str, ...]]  # the fields that identify a row

    key_dim: Whole
    seconds: Positive | None = None
    quartiles: tuple[float, ...] = ()
    rounds: Count | None = None
    peak_bytes: Count | None = None
    memory_ratio: float | None = None
    error: str | None = None

    @property
    def time(self) -> float:
        """The seconds; an error in a row that was not measured."""
        if self.seconds is None:
            raise ValueError(f"{self.label} was not measured: {self.error}")
        return self.seconds

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles."""
        return (self.quartiles[1] - self.quartiles[0]) / 2

    @property
    def label(self) -> str:
        named = {name.replace("_", " "): getattr(self, name) for name in self.LABELS}
        return ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)

    def memory_over(self, other: "TimedRow") -> float | None:
        """Return the peak memory relative to another row, or None where it is not known."""
        return self.peak_bytes / other.peak_bytes if self.peak_bytes and other.peak_bytes else None


class WidthRow(TimedRow):
    """A model, or a layer of its type, at a key dim and a value dim."""

    LABELS = ("model", "key_dim", "value_dim", "mode")

    model: str
    value_dim: Whole | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None

    @property
    def group(self) -> tuple[object, ...]:
        """What rows share that differ only in their dims."""
        return tuple(getattr(self, name) for name in self.LABELS if name not in ("key_dim", "value_dim"))

    def against(self: W, widest: W) -> W:
        """Return the row with its speed and memory relative to the widest row."""
        return replace(self, speedup=self.speed_over(widest), memory_ratio=self.memory_over(widest))

    def speed_over(self: W, widest: W) -> float:
        return widest.time / self.time


class GraphRow(WidthRow):
    """Timed as a CUDA graph where possible, and launched kernel by kernel (`eager_seconds`)."""

    graph: bool | None = None
    eager_seconds: float | None = None

    def speed_over(self: "GraphRow", widest: "GraphRow") -> float:
        """Return the speedup; without graphs where one of both rows has none."""
        if widest.graph == self.graph or widest.eager_seconds is None or self.eager_seconds is None:
            return widest.time / self.time
        return widest.eager_seconds / self.eager_seconds


class MixerRow(WidthRow):
    mode: str


class ModelRow(GraphRow):
    """A pass of a model; `width` is its own key dim."""

    mode: str
    width: Whole
    parameters: Count | None = None

    @property
    def compression(self) -> float:
        return round(1 - self.key_dim / self.width, 4)


class DecodeRow(GraphRow):
    """A step of `batch` sequences; bytes are per sequence, bandwidths in bytes per second."""

    LABELS = ("model", "key_dim", "value_dim", "batch")

    batch: Whole
    state_bytes: Count | None = None
    convolution_bytes: Count | None = None
    state_bandwidth: float | None = None
    share_of_copy_bandwidth: float | None = None
    roofline_seconds: float | None = None


class KernelRow(GraphRow):
    """A kernel of an engine; `model` names a shape, `state_bytes` is per layer and sequence."""

    mode: str
    state_bytes: Count | None = None
    share_of_copy_bandwidth: float | None = None
    difference: float | None = None  # largest from our recurrence, of outputs and states, in standard deviations


class CalibrationRow(TimedRow):
    """A calibration for one method, or the forward pass over the same text."""

    LABELS = ("method", "key_dim")

    method: str
    selection_seconds: float | None = None
    times_forward: float | None = None

    def against(self, forward: "CalibrationRow") -> "CalibrationRow":
        return replace(self, times_forward=self.time / forward.time, memory_ratio=self.memory_over(forward))


class BenchRecord(Record, Origin):
    """What all benchmarks record: the device, the kernels, the settings and the rows."""

    KIND = "bench"

    bench: str
    device: str
    dtype: str
    kernels: str
    settings: Mapping[str, Any]  # what was timed, by the names of the options
    rounds: Whole
    rows: tuple[TimedRow, ...]

    @classmethod
    def parse(cls: type[B], data: Mapping[str, object]) -> B:
        """Return the record as the class of its benchmark, which is this class or below it."""
        kinds = {kind.bench: kind for kind in BenchRecord.__subclasses__() if issubclass(kind, cls)}
        if (kind := kinds.get(str(data.get("bench")))) is None:
            raise ValidationError(f"bench must be one of {', '.join(kinds)}")
        return from_json(kind, data)

    def headline(self) -> str:
        return f"{self.bench} on {self.device} in {self.dtype}: {self.kernels}"

    def table(self) -> list[dict[str, object]]:
        """Return a row for every timing."""
        return [{name: value for name, value in vars(row).items() if value is not None} for row in self.rows]

    def contradiction(self) -> str | None:
        for place, row in enumerate(self.rows):
            if not row.error and (row.seconds is None or len(row.quartiles) != 2):
                return f"rows[{place}] must have a time with two quartiles, or an error"
        return None


class MixerRecord(BenchRecord):
    bench: Literal["mixer"] = "mixer"
    rows: Annotated[tuple[MixerRow, ...], NON_EMPTY]


class ModelRecord(BenchRecord):
    bench: Literal["model"] = "model"
    rows: Annotated[tuple[ModelRow, ...], NON_EMPTY]


class LargestBatch(Value):
    """The largest batch whose step fits into a GPU; None on a CPU, or where not even a small one fits."""

    model: str
    key_dim: Whole
    value_dim: Whole | None = None
    batch: Count | None = None

    @property
    def line(self) -> str:
        return f"{self.model} at {dims_text(self.key_dim, self.value_dim)}: a batch of {self.batch:,} fits"


class DecodeRecord(BenchRecord):
    """`copy_bandwidth` is the bandwidth of the device: bytes read and written per second."""

    bench: Literal["decode"] = "decode"
    rows: Annotated[tuple[DecodeRow, ...], NON_EMPTY]
    copy_bandwidth: Positive
    largest_batch: tuple[LargestBatch, ...] = ()


class KernelRecord(BenchRecord):
    """`copy_bandwidth` is the bandwidth of the device: bytes read and written per second."""

    bench: Literal["kernels"] = "kernels"
    rows: Annotated[tuple[KernelRow, ...], NON_EMPTY]
    copy_bandwidth: Positive


class CalibrationRecord(BenchRecord):
    bench: Literal["calibrate"] = "calibrate"
    rows: Annotated[tuple[CalibrationRow, ...], NON_EMPTY]
