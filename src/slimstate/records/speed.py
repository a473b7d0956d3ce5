"""How much faster narrower layers are."""

from __future__ import annotations

from slimstate.records.schema import Value


class TimedLayer(Value):
    """Where and how a layer was timed, and advice on the key dim."""

    device: str
    kernels: str
    source: str
    advice: str


class Speedup(Value):
    key_dim: int
    speedup: float


class WidthSpeeds(TimedLayer):
    """The speedup at each key dim that was timed below the width."""

    speedups: tuple[Speedup, ...]


class CutSpeed(TimedLayer):
    """The speedup of a cut."""

    speedup: float
