"""Which key dims pay, and for which use: a layer timed at many widths on a GPU, and what follows for a choice.

A curve is a record of `slimstate bench mixer` over many key dims, or of an engine's kernels, decoding and prefill each
by itself, kept in `curves/`. Kernels pad channels to blocks, so
a width between two that were measured runs no faster than the wider of them, and is taken as that. Of widths beyond the
widest or below the narrowest nothing is known and nothing is said, and neither of layers that were not timed, or whose
sizes are far from those that were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files

from slimstate.core.layout import Mixer
from slimstate.records.benchmark import KernelRecord, MixerRecord
from slimstate.records.speed import CutSpeed, Speedup, WidthSpeeds

CURVES = files("slimstate.serving") / "curves"
USES = {"decode": "decoding", "prefill": "prefill"}  # of an engine's kernels
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


def kernel_curve_of(record: KernelRecord, model_type: str, mode: str) -> Curve | None:
    """The curve of an engine's kernel for the first shape of a model type, or of one that it is a variant of."""
    shape = next((each for each in record.settings.shapes if model_type.startswith(each.name)), None)
    rows = [row for row in record.rows if shape and (row.model, row.mode) == (shape.name, mode) and not row.error]
    if shape is None or not rows:
        return None
    sizes = record.settings
    work = {
        "decode": f"a token for each of {sizes.sequences:,} sequences, states in float32",
        "prefill": f"{sizes.prompts} prompts of {sizes.length:,} tokens",
    }
    heads = f"{shape.key_heads} key and {shape.value_heads} value heads, value dim {shape.value_dim}, {record.dtype}"
    return Curve(
        device=record.device,
        kernels=record.kernels,
        conditions=f"the kernel of {record.kernels} by itself, {work[mode]}, {heads}",
        seconds={row.key_dim: row.time for row in rows},
        heads=shape.value_heads,
        value_dim=shape.value_dim,
    )


def _records() -> Iterator[MixerRecord | KernelRecord]:
    """Those in the package, by file name."""
    for entry in sorted(CURVES.iterdir(), key=lambda each: each.name) if CURVES.is_dir() else ():
        if entry.name.endswith(".json"):
            data = json.loads(entry.read_text(encoding="utf-8"))
            kind = KernelRecord if data.get("bench") == "kernels" else MixerRecord
            yield kind.from_json(data)


def known_curves(model_type: str, *key_dims: int, like: Mixer | None = None) -> dict[str, Curve]:
    """The curves in the package for layers of a model type that cover these key dims, by use; the first of each.

    Of those, with a layer `like` it, only curves of layers of about its size.
    """
    found: dict[str, Curve] = {}
    for record in _records():
        if isinstance(record, MixerRecord):
            by_use = {"": curve_of(record, model_type)}
        else:
            modes = record.settings.modes
            by_use = {USES[mode]: kernel_curve_of(record, model_type, mode) for mode in modes}
        for use, curve in by_use.items():
            if curve is not None and all(map(curve.covers, key_dims)) and (like is None or curve.near(like)):
                found.setdefault(use, curve)
    return found


def known_curve(model_type: str, *key_dims: int, like: Mixer | None = None) -> Curve | None:
    """The curve of a layer by itself: the first, by file name, that covers these key dims."""
    return known_curves(model_type, *key_dims, like=like).get("")


def _joined(advice: Mapping[str, str]) -> str:
    """What is said of every use, one after the other."""
    return "; ".join(f"{use}: {words}" if use else words for use, words in advice.items())


def speeds_below(model_type: str, mixer: Mixer) -> WidthSpeeds | None:
    """What narrower layers gain; None where that was not measured."""
    width = mixer.axis.width
    curves = {use: curve for use, curve in known_curves(model_type, width, like=mixer).items() if curve.narrower(width)}
    if not curves:
        return None
    first = next(iter(curves.values()))
    return WidthSpeeds(
        device=first.device,
        kernels=first.kernels,
        source=first.source(width),
        speedups=tuple(
            Speedup(key_dim=key_dim, speedup=first.speedup(width, key_dim)) for key_dim in first.narrower(width)
        ),
        advice=_joined({use: curve.summary(width) for use, curve in curves.items()}),
    )


def speed_of_cut(model_type: str, mixer: Mixer, key_dim: int) -> CutSpeed | None:
    """What a cut does to the speed of a layer; None where that was not measured."""
    width = mixer.axis.width
    curves = known_curves(model_type, width, key_dim, like=mixer) if key_dim < width else {}
    if not curves:
        return None
    first = next(iter(curves.values()))
    return CutSpeed(
        device=first.device,
        kernels=first.kernels,
        source=first.source(width, key_dim),
        speedup=first.speedup(width, key_dim),
        advice=_joined({use: curve.advice(width, key_dim) for use, curve in curves.items()}),
    )
