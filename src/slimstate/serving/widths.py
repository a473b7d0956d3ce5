"""Which key dims pay: a layer timed at many widths on a GPU, and what follows for a choice of key dim.

A curve is a record of `slimstate bench mixer` over many key dims, kept in `curves/`. Kernels pad channels to blocks, so
a width between two that were measured runs no faster than the wider of them, and is taken as that. Of widths beyond the
widest or below the narrowest nothing is known and nothing is said, and neither of layers that were not timed, or whose
sizes are far from those that were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from slimstate.core.layout import Mixer
from slimstate.records.benchmark import MixerRecord
from slimstate.records.speed import SpeedOfCut, SpeedsBelow, Speedup

CURVES = files("slimstate.serving") / "curves"
FAR = 2  # times as many heads or value channels as were timed: beyond that nothing is said
ALIKE = 0.04  # a difference in speed that is not worth a word, and may be noise


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds of a forward pass through one layer by key dim, and how they were measured."""

    device: str
    kernels: str
    conditions: str
    seconds: Mapping[int, float]
    heads: int
    value_dim: int

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds.values()) <= 0:
            raise ValueError("a curve without times, or with times that are none")

    def near(self, mixer: Mixer) -> bool:
        """Whether the layer is about as large as the one that was timed: half to twice its heads and its values."""
        sizes = ((mixer.value_heads, self.heads), (mixer.value_dim, self.value_dim))
        return all(measured <= FAR * size <= FAR * FAR * measured for size, measured in sizes)

    def covers(self, key_dim: int) -> bool:
        return min(self.seconds) <= key_dim <= max(self.seconds)

    def taken_as(self, key_dim: int) -> int:
        """The key dim itself where it was measured, else the next wider one that was."""
        return min(measured for measured in self.seconds if measured >= key_dim)

    def speedup(self, width: int, key_dim: int) -> float:
        """How many times as fast as at the width the layer is at the key dim."""
        return self.seconds[self.taken_as(width)] / self.seconds[self.taken_as(key_dim)]

    def faster(self, key_dim: int, other: int) -> bool:
        """Whether the layer is clearly faster at the key dim than at the other."""
        return self.speedup(other, key_dim) > 1 + ALIKE

    def narrower(self, width: int) -> list[int]:
        """The measured key dims below a width, the widest first."""
        return sorted((measured for measured in self.seconds if measured < width), reverse=True)

    def paying(self, width: int) -> list[int]:
        """The key dims that are clearly faster than the width and than every wider one of this list."""
        found = [width]
        for key_dim in self.narrower(width):
            if self.faster(key_dim, found[-1]):
                found.append(key_dim)
        return found[1:]

    def next_step(self, key_dim: int) -> int | None:
        """The nearest narrower key dim, more than half as wide, at which the time drops all at once."""
        wider = self.taken_as(key_dim)
        for measured in self.narrower(key_dim):
            if 2 * measured > key_dim and self.faster(measured, wider) and self.faster(measured, key_dim):
                return measured
            wider = measured
        return None

    def advice(self, width: int, key_dim: int) -> str:
        """What a cut gains, where a little less would gain clearly more, and how that is known."""
        times, step = self.speedup(width, key_dim), self.next_step(key_dim)
        alike = abs(times - 1) <= ALIKE
        about = "" if {width, key_dim} <= self.seconds.keys() else "about "
        gain = f"runs at the speed of {width}" if alike else f"is {about}{times:.2f}x as fast as {width}"
        better = "" if step is None else f"; {step} is {self.speedup(width, step):.2f}x"
        return f"key dim {key_dim} {gain}{better} ({self.source(width, key_dim)})"

    def summary(self, width: int) -> str:
        """Every key dim that pays, in a line."""
        paying = self.paying(width)
        level = [key_dim for key_dim in self.narrower(width) if key_dim > max(paying, default=0)]
        parts = [f"{_span(level)} no faster"] if level else []
        parts += [", ".join(f"{key_dim} {self.speedup(width, key_dim):.2f}x" for key_dim in paying)] if paying else []
        between = f"; those between gain less than {ALIKE:.0%} on the next wider one named" if paying else ""
        head = f"speed against key dim {width}, gains up to {ALIKE:.0%} left out"
        return f"{head}: {'; '.join(parts)}{between} ({self.source(width)})"

    def source(self, *key_dims: int) -> str:
        """Where and how it was measured, and which of these key dims were not."""
        taken = [f"{key_dim} taken as {self.taken_as(key_dim)}" for key_dim in key_dims if key_dim not in self.seconds]
        return "; ".join([f"{self.device}: {self.conditions}", *taken, "a whole model gains less"])


def _span(key_dims: list[int]) -> str:
    return str(key_dims[0]) if len(key_dims) == 1 else f"{key_dims[0]} to {key_dims[-1]}"


def curve_of(record: MixerRecord, model_type: str) -> Curve | None:
    """The curve of one model type in a record of `slimstate bench mixer`, if its layer was timed."""
    rows = [row for row in record.rows if (row.model, row.mode) == (model_type, "forward") and not row.error]
    if not rows:
        return None
    sizes = record.settings
    return Curve(
        device=record.device,
        kernels=record.kernels,
        conditions=(
            f"one layer by itself, forward over {sizes.batch} x {sizes.length} tokens, hidden {sizes.hidden},"
            f" {sizes.heads} heads, value dim {sizes.value_dim}, {record.dtype}"
        ),
        seconds={row.key_dim: row.time for row in rows},
        heads=sizes.heads,
        value_dim=sizes.value_dim,
    )


def known_curve(model_type: str, *key_dims: int, like: Mixer | None = None) -> Curve | None:
    """The curve in the package for a layer: the first, by file name, that has these key dims, of about its size."""
    entries = sorted(CURVES.iterdir(), key=lambda entry: entry.name) if CURVES.is_dir() else []
    for entry in entries:
        if entry.name.endswith(".json"):
            curve = curve_of(MixerRecord.from_json(json.loads(entry.read_text(encoding="utf-8"))), model_type)
            if curve is not None and all(map(curve.covers, key_dims)) and (like is None or curve.near(like)):
                return curve
    return None


def speeds_below(model_type: str, mixer: Mixer) -> SpeedsBelow | None:
    """What narrower layers gain; None where that was not measured."""
    width = mixer.axis.width
    curve = known_curve(model_type, width, like=mixer)
    if curve is None or not curve.narrower(width):
        return None
    return SpeedsBelow(
        device=curve.device,
        kernels=curve.kernels,
        source=curve.source(width),
        speedups=tuple(
            Speedup(key_dim=key_dim, speedup=curve.speedup(width, key_dim)) for key_dim in curve.narrower(width)
        ),
        advice=curve.summary(width),
    )


def speed_of_cut(model_type: str, mixer: Mixer, key_dim: int) -> SpeedOfCut | None:
    """What a cut does to the speed of a layer; None where that was not measured."""
    width = mixer.axis.width
    curve = known_curve(model_type, width, key_dim, like=mixer) if key_dim < width else None
    if curve is None:
        return None
    return SpeedOfCut(
        device=curve.device,
        kernels=curve.kernels,
        source=curve.source(width, key_dim),
        speedup=curve.speedup(width, key_dim),
        advice=curve.advice(width, key_dim),
    )
