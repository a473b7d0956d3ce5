"""Convert a model folder to GGUF, which llama.cpp reads, by the converter that the user names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from slimstate.serving.verification.engine_call import EngineOptions, Refused, run_program
from slimstate.system.errors import PlanError

PROGRAM = Path(__file__).with_name("gguf_process.py")
OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
WHERE = "a checkout of llama.cpp has it, and so has the source archive of llama-cpp-python, in vendor/llama.cpp"


@contextmanager
def converted(folder: Path, options: EngineOptions, dtype: str) -> Iterator[Path | Refused]:
    """A GGUF file of the model, which is removed at the end; or what the converter has against the model.

    The converter needs torch and transformers, so that it runs in this environment.
    """
    if options.converter is None:
        raise PlanError(f"llama.cpp reads GGUF: name its convert_hf_to_gguf.py with `converter` ({WHERE})")
    with TemporaryDirectory(prefix="slimstate-gguf-") as place:
        target = Path(place) / "model.gguf"
        request = {
            "converter": str(options.converter), "model": str(folder), "out": str(target), "outtype": OUTTYPES[dtype],
        }  # fmt: skip
        ended = run_program(sys.executable, PROGRAM, request)
        if target.is_file() and not ended.answer:
            yield target
        else:
            yield Refused(version=None, words=f"converter: {ended.words(ended.answer.get('error'))}")
