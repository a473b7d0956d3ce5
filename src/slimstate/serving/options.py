"""Options about serving engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimstate.system.options import Options

EngineName = Literal["transformers", "mlx", "llama.cpp", "vllm", "sglang"]


@dataclass(frozen=True, kw_only=True)
class EngineChoice(Options):
    """Serving"""

    engine: EngineName | None = None
    """Engine that will serve the model: transformers, mlx, llama.cpp, vllm or sglang; shows what it does with it."""
