"""The part that runs llama.cpp's own converter to GGUF: it imports nothing of slimstate and speaks JSON over two files.

    python gguf_process.py REQUEST.json ANSWER.json

The request names the converter (`convert_hf_to_gguf.py`), the model folder, the file to write and its precision. The
converter knows tokenizers by a digest and stops at one it does not know, such as one that was trained here. Tokens
and their numbers are written all the same then, as for GPT-2's: engines are asked with token ids, never with text.
Heads for speculative decoding are left out, which a model may have lost or never had.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

UNKNOWN = "gpt-2"  # how llama.cpp is told to split text, where the converter cannot tell


def convert(request: Any) -> None:
    converter = Path(request["converter"]).resolve()
    sys.path.insert(0, str(converter.parent))
    flags = {"outfile": request["out"], "outtype": request["outtype"]}
    sys.argv = [str(converter), *(word for name, value in flags.items() for word in (f"--{name}", value))]
    sys.argv.append(request["model"])
    names = runpy.run_path(str(converter), run_name="converter")
    for model in [*names.values(), *vars(sys.modules.get("conversion.base", sys)).values()]:
        known = vars(model) if isinstance(model, type) else {}
        if "get_vocab_base_pre" in known:
            model.get_vocab_base_pre = tolerant(model.get_vocab_base_pre)  # type: ignore[attr-defined]
        if "no_mtp" in known:
            model.no_mtp = True  # type: ignore[attr-defined]
    names["main"]()


def tolerant(original: Callable[[Any, Any], str]) -> Callable[[Any, Any], str]:
    def split_of(model: Any, tokenizer: Any) -> str:
        try:
            return original(model, tokenizer)
        except NotImplementedError:
            return UNKNOWN

    return split_of


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answered = Path(sys.argv[2])
    answer = {}
    try:
        convert(request)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    answered.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
