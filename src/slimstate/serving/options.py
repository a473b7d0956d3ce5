"""Options about serving engines."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from slimstate.data.options import DocumentOptions
from slimstate.system.errors import PlanError, quoted
from slimstate.system.options import Options

EngineName = Literal["transformers", "mlx", "llama.cpp", "vllm", "sglang"]


class EngineChoice(Options):
    """Serving"""

    engine: EngineName | None = None
    """Engine that will serve the model: transformers, mlx, llama.cpp, vllm or sglang. Says what it does with the
    model; a cut keeps as many values as keys where the engine serves no others."""


class PoolOptions(Options):
    """Memory of a serving engine"""

    context: Annotated[int | None, Meta(ge=0)] = None
    """Tokens per sequence; with `engine` vllm or sglang and `memory_gb`: how many such sequences fit on each GPU."""
    prefix_caching: bool = False
    """States are stored to be shared between sequences."""
    tensor_parallel: Annotated[int, Meta(ge=1)] = 1
    """GPUs that share every layer."""
    speculative_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens that vLLM drafts at once."""
    kv_dtype: Literal["bfloat16", "fp8"] = "bfloat16"
    """Data type of the keys and values of softmax attention: bfloat16 or fp8."""


class EngineOptions(EngineChoice):
    """Engine"""

    engine: EngineName | None = None
    """Engine to run: transformers, mlx, llama.cpp, vllm or sglang."""
    python: Path | None = None
    """Interpreter of the environment that has the engine; default: this one."""
    converter: Path | None = None
    """For llama.cpp: its convert_hf_to_gguf.py, which converts the model to GGUF first."""
    gguf_type: Literal["q8_0", "q4_k_m"] | None = None
    """For llama.cpp: quantise the GGUF to q8_0 or q4_k_m; default: do not quantise it."""
    engine_settings: str | None = None
    """JSON with settings of the engine itself, such as '{"gpu_memory_utilization": 0.5}' for vllm."""

    def check(self) -> None:
        for name, path in (("python", self.python), ("converter", self.converter)):
            if path is not None and not path.is_file():
                raise PlanError(f"`{name}` must be a file, got {quoted(path)}")
        is_gguf, has_settings = self.engine == "llama.cpp", self.engine not in ("transformers", "mlx")
        self.refuse(("gguf_type", "converter"), "is for `engine` llama.cpp, which reads GGUF", unless=is_gguf)
        self.refuse(("engine_settings",), "is for `engine` llama.cpp, vllm or sglang", unless=has_settings)
        if not isinstance(self.settings, dict):
            raise PlanError("`engine_settings` must be a JSON object of names and values")

    @property
    def interpreter(self) -> str:
        return sys.executable if self.python is None else str(self.python)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the engine by name."""
        try:
            settings: dict[str, Any] = json.loads(self.engine_settings or "{}")
        except ValueError as error:
            raise PlanError(f"`engine_settings` must be JSON: {error}") from error
        return settings


class ComparisonOptions(DocumentOptions):
    """Comparison"""

    data: str | None = None
    """Text to read: a .txt, .jsonl or .parquet file (also .gz or .xz), a folder of them, or a datasets name; default: a
    short one that comes with slimstate."""
    samples: Annotated[int, Meta(ge=1)] = 4
    """Windows of the text."""
    length: Annotated[int, Meta(ge=4)] = 64
    """Tokens per window; the first half is the prompt for decoding."""
    tokens: Annotated[int, Meta(ge=1)] = 16
    """Tokens to decode after each prompt."""
    tolerance: Annotated[float | None, Meta(gt=0)] = None
    """Largest difference that agrees, in standard deviations of the logits; default: 1e-3 in float32, 0.1 in bfloat16,
    0.05 in float16, 0.5 in q8_0, 2 in q4_k_m; 0.05 in both with `masked`."""
