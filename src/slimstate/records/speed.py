"""What narrower layers gain in speed, as `inspect` and `prune` tell it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TimedLayer:
    """Where and how a layer was timed, and what follows for a choice of key dim."""

    device: str
    kernels: str
    source: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class Speedup:
    key_dim: int
    speedup: float


@dataclass(frozen=True, kw_only=True)
class SpeedsBelow(TimedLayer):
    """How many times as fast the layer is at each key dim that was timed below its width."""

    speedups: tuple[Speedup, ...]


@dataclass(frozen=True, kw_only=True)
class SpeedOfCut(TimedLayer):
    """How many times as fast the layer is after a cut."""

    speedup: float
