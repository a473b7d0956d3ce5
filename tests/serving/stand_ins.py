"""Packages that replace engines in tests: with the same names and types of answers, and with scores from a table."""

import json
from pathlib import Path

VLLM = """
import json, os
from pathlib import Path
from types import SimpleNamespace as Value

TABLE = json.loads(Path(os.environ["STAND_IN"]).read_text())

class SamplingParams:
    def __init__(self, *, temperature, ignore_eos, detokenize, max_tokens, logprobs=None, prompt_logprobs=None):
        self.tokens, self.logprobs, self.prompt_logprobs = max_tokens, logprobs == 0, prompt_logprobs == 0

class LLM:
    def __init__(self, model, dtype, **settings):
        if TABLE["error"]:
            raise RuntimeError(TABLE["error"])

    def generate(self, prompts, sampling):
        return [self.output(prompt["prompt_token_ids"], sampling) for prompt in prompts]

    def output(self, tokens, sampling):
        row = TABLE["scores"][str(tokens)]
        before = [None] + [{t: Value(logprob=p)} for t, p in zip(tokens[1:], row["prefill"])]
        after = [{t: Value(logprob=p)} for t, p in zip(row["continued"], row["decoding"])][: sampling.tokens]
        output = Value(token_ids=row["continued"][: sampling.tokens], logprobs=after if sampling.logprobs else None)
        return Value(prompt_logprobs=before if sampling.prompt_logprobs else None, outputs=[output])
"""
SGLANG = """
import json, os
from pathlib import Path

TABLE = json.loads(Path(os.environ["STAND_IN"]).read_text())

class Engine:
    def __init__(self, model_path, dtype, **settings):
        pass

    def generate(self, input_ids, sampling_params, return_logprob, logprob_start_len):
        return [{"meta_info": self.info(tokens, sampling_params["max_new_tokens"])} for tokens in input_ids]

    def info(self, tokens, count):
        row = TABLE["scores"][str(tokens)]
        before = [(None, tokens[0], None)] + [(p, t, None) for t, p in zip(tokens[1:], row["prefill"])]
        after = [(p, t, None) for t, p in zip(row["continued"], row["decoding"])]
        return {"input_token_logprobs": before, "output_token_logprobs": after[:count]}

    def shutdown(self):
        pass
"""


def install(folder: Path, scores: dict[str, object], error: str = "") -> dict[str, str]:
    """Write both packages to a folder; return the environment in which they answer with these scores."""
    for name, text in (("vllm", VLLM), ("sglang", SGLANG)):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f'__version__ = "0.0.1"\n{text}')
    (folder / "scores.json").write_text(json.dumps({"scores": scores, "error": error}))
    return {"PYTHONPATH": str(folder), "STAND_IN": str(folder / "scores.json")}
