"""Convert a model folder to GGUF, which llama.cpp reads, with a converter that the user names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from slimstate.serving.verification.engine_call import Refusal, run_program
from slimstate.system.errors import PlanError

PROGRAM = Path(__file__).with_name("gguf_process.py")
OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@contextmanager
def convert_to_gguf(folder: Path, converter: Path | None, dtype: str) -> Iterator[Path | Refusal]:
    """Yield a temporary GGUF file of the model, or the error of the converter.

    The converter needs torch and transformers, so it runs in this environment.
    """
    if converter is None:
        raise PlanError(
            "llama.cpp reads GGUF: pass its convert_hf_to_gguf.py as `converter`; it is in a checkout of llama.cpp and"
            " in the source archive of llama-cpp-python, under vendor/llama.cpp"
        )
    with TemporaryDirectory(prefix="slimstate-gguf-") as temporary:
        target = Path(temporary) / "model.gguf"
        request = {
            "converter": str(converter), "model": str(folder), "out": str(target), "outtype": OUTTYPES[dtype]
        }  # fmt: skip
        result = run_program(sys.executable, PROGRAM, request)
        if target.is_file() and not result.answer:
            yield target
        else:
            yield Refusal(version=None, message=f"converter: {result.message(result.answer.get('error'))}")
