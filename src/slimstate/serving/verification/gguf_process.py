"""Run llama.cpp's own converter to GGUF. This program imports nothing of slimstate and exchanges two JSON files.

    python gguf_process.py REQUEST.json ANSWER.json

The request names the converter (`convert_hf_to_gguf.py`), the model folder, the file to write and its precision. The
converter knows tokenizers by a digest and stops at an unknown one, such as one that was trained here; then the tokens
are written as for GPT-2, because engines get token ids and never text. Heads for speculative decoding, which a model
may lack, are left out.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FALLBACK = "gpt-2"  # pre-tokenizer where the converter does not know the model's


def convert(request: Any) -> None:
    converter = Path(request["converter"]).resolve()
    sys.path.insert(0, str(converter.parent))
    sys.argv = [str(converter), "--outfile", request["out"], "--outtype", request["outtype"], request["model"]]
    names = runpy.run_path(str(converter), run_name="converter")
    for model in [*names.values(), *vars(sys.modules.get("conversion.base", sys)).values()]:
        attributes = vars(model) if isinstance(model, type) else {}
        if "get_vocab_base_pre" in attributes:
            model.get_vocab_base_pre = with_fallback(model.get_vocab_base_pre)  # type: ignore[attr-defined]
        if "no_mtp" in attributes:
            model.no_mtp = True  # type: ignore[attr-defined]
    names["main"]()


def with_fallback(original: Callable[[Any, Any], str]) -> Callable[[Any, Any], str]:
    def pre_tokenizer(model: Any, tokenizer: Any) -> str:
        try:
            return original(model, tokenizer)
        except NotImplementedError:
            return FALLBACK

    return pre_tokenizer


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answer_path, answer = Path(sys.argv[2]), {}
    try:
        convert(request)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    answer_path.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
