"""Packages that stand in for engines: they have the names and the answers of the real ones, and look scores up."""

from __future__ import annotations

import json
from pathlib import Path

VLLM = """
import json, os
from pathlib import Path
from types import SimpleNamespace as Value

TABLE = json.loads(Path(os.environ["STAND_IN"]).read_text())

class SamplingParams:
    def __init__(self, *, temperature, ignore_eos, detokenize, max_tokens, logprobs=None, prompt_logprobs=None):
        self.tokens, self.scored, self.prompted = max_tokens, logprobs == 0, prompt_logprobs == 0

class LLM:
    def __init__(self, model, dtype, **settings):
        if TABLE["error"]:
            raise RuntimeError(TABLE["error"])

    def generate(self, prompts, sampling):
        return [self.output(prompt["prompt_token_ids"], sampling) for prompt in prompts]

    def output(self, tokens, sampling):
        known = TABLE["scores"][str(tokens)]
        before = [None] + [{t: Value(logprob=p)} for t, p in zip(tokens[1:], known["prefill"])]
        after = [{t: Value(logprob=p)} for t, p in zip(known["continued"], known["decoding"])][: sampling.tokens]
        made = Value(token_ids=known["continued"][: sampling.tokens], logprobs=after if sampling.scored else None)
        return Value(prompt_logprobs=before if sampling.prompted else None, outputs=[made])
"""
SGLANG = """
import json, os
from pathlib import Path

TABLE = json.loads(Path(os.environ["STAND_IN"]).read_text())

class Engine:
    def __init__(self, model_path, dtype, **settings):
        pass

    def generate(self, input_ids, sampling_params, return_logprob, logprob_start_len):
        return [{"meta_info": self.about(tokens, sampling_params["max_new_tokens"])} for tokens in input_ids]

    def about(self, tokens, count):
        known = TABLE["scores"][str(tokens)]
        before = [(None, tokens[0], None)] + [(p, t, None) for t, p in zip(tokens[1:], known["prefill"])]
        after = [(p, t, None) for t, p in zip(known["continued"], known["decoding"])]
        return {"input_token_logprobs": before, "output_token_logprobs": after[:count]}

    def shutdown(self):
        pass
"""


def install(place: Path, scores: dict[str, object], error: str = "") -> dict[str, str]:
    """Both packages in a folder; returns the environment in which they are found and answer with these scores."""
    for name, text in (("vllm", VLLM), ("sglang", SGLANG)):
        (place / name).mkdir(parents=True)
        (place / name / "__init__.py").write_text(f'__version__ = "0.0.1"\n{text}')
    (place / "scores.json").write_text(json.dumps({"scores": scores, "error": error}))
    return {"PYTHONPATH": str(place), "STAND_IN": str(place / "scores.json")}
