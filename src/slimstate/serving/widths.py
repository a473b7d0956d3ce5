"""Estimate how much faster a cut layer is, from layers that were timed at many key dims on a GPU.

A curve is a record of `slimstate bench mixer` over many key dims, of an engine's kernels with decoding and prefill
apart, or of `slimstate bench decode` over pairs of a key and a value dim, in the folder `curves/`. Kernels pad channels
to blocks, so a key dim between two measured ones is assumed to run at the speed of the wider one. There is no estimate
for key dims outside the measured range, for pairs and layers that were not timed, or for layers whose sizes are far
from those that were.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from importlib.resources import files

from slimstate.core.layout import Mixer
from slimstate.records.benchmark import DecodeRecord, KernelRecord, MixerRecord, WidthRow
from slimstate.records.numbers import dims_text
from slimstate.records.serving import LayerSpeed
from slimstate.system.value import Value

CURVES = files("slimstate.serving") / "curves"
USES = {"decode": "decoding", "prefill": "prefill"}  # of an engine's kernels
MAX_SIZE_RATIO = 2  # between the heads or value channels of a layer and those of the timed one
TOLERANCE = 0.04  # relative difference in speed that may be noise


class Curve(Value):
    """Seconds of one layer by key dim, and how they were measured."""

    device: str
    kernels: str
    conditions: str
    seconds: Mapping[int, float]
    heads: int
    value_dim: int
    pairs: Mapping[tuple[int, int], float] = field(default_factory=dict)  # seconds by key and value dim, if both vary
    scope: str = "a whole model gains less"

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds.values()) <= 0:
            raise ValueError("a curve needs at least one time, and all times must be positive")

    def is_similar(self, mixer: Mixer) -> bool:
        """Return whether a layer has between half and twice the heads and value channels of the timed one."""
        sizes = ((mixer.value_heads, self.heads), (mixer.value_dim, self.value_dim))
        return all(max(size, timed) <= MAX_SIZE_RATIO * min(size, timed) for size, timed in sizes)

    def covers(self, key_dim: int) -> bool:
        return min(self.seconds) <= key_dim <= max(self.seconds)

    def measured_key_dim(self, key_dim: int) -> int:
        """Return the key dim itself where it was measured, else the next wider one that was."""
        return min(measured for measured in self.seconds if measured >= key_dim)

    def speedup(self, width: int, key_dim: int) -> float:
        """Return how many times as fast the layer is at the key dim as at the width."""
        return self.seconds[self.measured_key_dim(width)] / self.seconds[self.measured_key_dim(key_dim)]

    def is_faster(self, key_dim: int, other: int) -> bool:
        """Return whether the layer is clearly faster at the key dim than at the other."""
        return self.speedup(other, key_dim) > 1 + TOLERANCE

    def below(self, width: int) -> list[int]:
        """Return the measured key dims below a width, the widest first."""
        return sorted((measured for measured in self.seconds if measured < width), reverse=True)

    def faster_key_dims(self, width: int) -> list[int]:
        """Return the key dims that are clearly faster than the width and than every wider one in this list."""
        steps = [width]
        for key_dim in self.below(width):
            if self.is_faster(key_dim, steps[-1]):
                steps.append(key_dim)
        return steps[1:]

    def next_step(self, key_dim: int) -> int | None:
        """Return the nearest narrower key dim, more than half as wide, at which the time drops in one step."""
        wider = self.measured_key_dim(key_dim)
        for measured in self.below(key_dim):
            if 2 * measured > key_dim and self.is_faster(measured, wider) and self.is_faster(measured, key_dim):
                return measured
            wider = measured
        return None

    def advice(self, width: int, key_dim: int) -> str:
        """Return a line on what a cut gains, and the next narrower key dim that gains clearly more."""
        times, step = self.speedup(width, key_dim), self.next_step(key_dim)
        about = "" if {width, key_dim} <= self.seconds.keys() else "about "
        is_level = abs(times - 1) <= TOLERANCE
        gain = f"runs at the speed of {width}" if is_level else f"is {about}{times:.2f}x as fast as {width}"
        better = "" if step is None else f"; {step} is {self.speedup(width, step):.2f}x"
        return f"key dim {key_dim} {gain}{better} ({self.source(width, key_dim)})"

    def summary(self, width: int) -> str:
        """Return a line with every key dim that gains speed."""
        faster = self.faster_key_dims(width)
        level = [key_dim for key_dim in self.below(width) if key_dim > max(faster, default=0)]
        span = " to ".join(map(str, dict.fromkeys((level[0], level[-1])))) if level else ""
        parts = [f"{span} no faster"] if level else []
        parts += [", ".join(f"{key_dim} {self.speedup(width, key_dim):.2f}x" for key_dim in faster)] if faster else []
        between = f"; those between gain less than {TOLERANCE:.0%} on the next wider one named" if faster else ""
        head = f"speed against key dim {width}, gains up to {TOLERANCE:.0%} left out"
        return f"{head}: {'; '.join(parts)}{between} ({self.source(width)})"

    def source(self, *key_dims: int) -> str:
        """Return where and how the curve was measured, and which of these key dims were not."""
        substitutes = {key_dim: self.measured_key_dim(key_dim) for key_dim in key_dims if key_dim not in self.seconds}
        others = [f"{key_dim} taken as {other}" for key_dim, other in substitutes.items()]
        return "; ".join([f"{self.device}: {self.conditions}", *others, self.scope])


def mixer_curve(record: MixerRecord, model_type: str) -> Curve | None:
    """Return the forward curve of a model type in a record of `slimstate bench mixer`, if its layer was timed."""
    sizes = record.settings
    conditions = (
        f"one layer by itself, forward over {sizes['batch']} x {sizes['length']} tokens, hidden {sizes['hidden']},"
        f" {sizes['heads']} heads, value dim {sizes['value_dim']}"
    )
    rows = (row for row in record.rows if (row.model, row.mode) == (model_type, "forward"))
    return _curve(record, rows, conditions, sizes["heads"], sizes["value_dim"])


def kernel_curve(record: KernelRecord, model_type: str, mode: str) -> Curve | None:
    """Return the curve of an engine's kernel for a model type, or for the type that it is a variant of."""
    sizes = record.settings
    shape = next((shape for shape in sizes["shapes"] if model_type.startswith(shape["name"])), None)
    if shape is None:
        return None
    if mode == "decode":
        work = f"a token for each of {sizes['sequences']:,} sequences, states in float32"
    else:
        work = f"{sizes['prompts']} prompts of {sizes['length']:,} tokens"
    heads = f"{shape['key_heads']} key and {shape['value_heads']} value heads, value dim {shape['value_dim']}"
    conditions = f"the kernel of {record.kernels} by itself, {work}, {heads}"
    rows = (row for row in record.rows if (row.model, row.mode) == (shape["name"], mode))
    return _curve(record, rows, conditions, shape["value_heads"], shape["value_dim"])


def decoding_curve(record: DecodeRecord, model_type: str) -> Curve | None:
    """Return the curve of decoding steps of a whole model of this type, with the most sequences that were timed."""
    sizes, batch = record.settings, max(record.settings["batches"])
    name = next((name for name in sizes["models"] if name.startswith(f"{model_type}-")), None)
    rows = (row for row in record.rows if (row.model, row.batch) == (name, batch))
    conditions = f"a decoding step of a whole {name}, {batch:,} sequences"
    curve = _curve(record, rows, conditions, sizes["heads"], sizes["value_dim"])
    return curve and replace(curve, scope="one sequence gains nothing")


def _curve(
    record: MixerRecord | KernelRecord | DecodeRecord, timed: Iterable[WidthRow], conditions: str, heads: int,
    value_dim: int,
) -> Curve | None:  # fmt: skip
    rows = [row for row in timed if not row.error]
    seconds = {row.key_dim: row.time for row in rows if row.value_dim in (None, value_dim)}
    if not seconds:
        return None
    pairs = {(row.key_dim, row.value_dim): row.time for row in rows if row.value_dim is not None}
    return Curve(
        device=record.device, kernels=str(record.kernels), conditions=f"{conditions}, {record.dtype}",
        seconds=seconds, heads=heads, value_dim=value_dim, pairs=pairs if len(pairs) > len(seconds) else {},
    )  # fmt: skip


def _curves(model_type: str) -> Iterator[tuple[str, Curve | None]]:
    """Yield the curves in the package by use, in the order of their files; the use of a whole layer is empty."""
    paths = [path for path in CURVES.iterdir() if path.name.endswith(".json")] if CURVES.is_dir() else []
    for path in sorted(paths, key=lambda path: path.name):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("bench") == "kernels":
            kernels = KernelRecord.from_json(data)
            for mode in kernels.settings["modes"]:
                yield USES[mode], kernel_curve(kernels, model_type, mode)
        elif data.get("bench") == "decode":
            yield USES["decode"], decoding_curve(DecodeRecord.from_json(data), model_type)
        else:
            yield "", mixer_curve(MixerRecord.from_json(data), model_type)


def matching_curves(model_type: str, *key_dims: int, mixer: Mixer | None = None) -> dict[str, Curve]:
    """Return the first curve of each use that covers these key dims, and that is of a layer similar to the mixer.

    Curves over pairs of dims have few key dims, and are left out.
    """
    curves: dict[str, Curve] = {}
    for use, curve in _curves(model_type):
        if curve is None or curve.pairs or not all(map(curve.covers, key_dims)):
            continue
        if mixer is None or curve.is_similar(mixer):
            curves.setdefault(use, curve)
    return curves


def _pair_speeds(model_type: str, mixer: Mixer, *cut: tuple[int, int]) -> LayerSpeed | None:
    """Return the speed at this key and value dim, or at all that were timed; None where that was not measured."""
    own = mixer.axis.width, mixer.value_dim
    for _, curve in _curves(model_type):
        if curve is None or not {own, *cut} <= curve.pairs.keys() or not curve.is_similar(mixer):
            continue
        below = [pair for pair in curve.pairs if pair != own and pair[0] <= own[0] and pair[1] <= own[1]]
        speeds = {pair: curve.pairs[own] / curve.pairs[pair] for pair in cut or below}
        listed = ", ".join(f"{dims_text(*pair)} {speed:.2f}x" for pair, speed in speeds.items())
        line = f"speed against key dim x value dim {dims_text(*own)}: {listed} ({curve.source()})"
        return LayerSpeed(
            device=curve.device, kernels=curve.kernels, source=curve.source(), advice=line,
            speedups={pair[0]: speed for pair, speed in speeds.items() if cut},
        )  # fmt: skip
    return None


def speeds_below(model_type: str, mixer: Mixer) -> LayerSpeed | None:
    """Return what narrower layers gain; None where that was not measured."""
    width = mixer.axis.width
    curves = matching_curves(model_type, width, mixer=mixer)
    curves = {use: curve for use, curve in curves.items() if curve.below(width)}
    keys = _layer_speed(curves, {use: curve.summary(width) for use, curve in curves.items()}, width)
    both = _pair_speeds(model_type, mixer)
    return both if keys is None else keys if both is None else replace(keys, advice=f"{keys.advice}; {both.advice}")


def speed_of_cut(model_type: str, mixer: Mixer, key_dim: int, value_dim: int | None = None) -> LayerSpeed | None:
    """Return what a cut does to the speed of a layer; None where that was not measured."""
    width = mixer.axis.width
    if value_dim is not None:
        return _pair_speeds(model_type, mixer, (key_dim, value_dim))
    curves = matching_curves(model_type, width, key_dim, mixer=mixer) if key_dim < width else {}
    return _layer_speed(curves, {use: curve.advice(width, key_dim) for use, curve in curves.items()}, width, key_dim)


def _layer_speed(curves: Mapping[str, Curve], lines: Mapping[str, str], width: int, *cut: int) -> LayerSpeed | None:
    """Return the lines, and the speedups of the first curve at the key dim of a cut or else at all below the width."""
    if not curves:
        return None
    curve = next(iter(curves.values()))
    return LayerSpeed(
        device=curve.device, kernels=curve.kernels, source=curve.source(width, *cut),
        advice="; ".join(f"{use}: {line}" if use else line for use, line in lines.items()),
        speedups={key_dim: curve.speedup(width, key_dim) for key_dim in cut or curve.below(width)},
    )  # fmt: skip
