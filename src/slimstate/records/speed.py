"""What narrower layers gain in speed, as `inspect` and `prune` tell it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Speedup:
    key_dim: int
    speedup: float


@dataclass(frozen=True, kw_only=True)
class SpeedsBelow:
    """How many times as fast a layer is at each key dim that was timed below its width."""

    device: str
    kernels: str
    source: str
    speedups: tuple[Speedup, ...]
    advice: str


@dataclass(frozen=True, kw_only=True)
class SpeedOfCut:
    """How many times as fast a layer is after a cut."""

    device: str
    kernels: str
    source: str
    speedup: float
    advice: str
