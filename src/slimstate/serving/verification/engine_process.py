"""Score a model with an engine, in the engine's own environment, or convert one to GGUF for llama.cpp.

    python engine_process.py REQUEST.json ANSWER.json

This program imports nothing of slimstate and exchanges two JSON files. The request has the engine, the model, windows
of token ids, how many tokens of each are a prompt, and how many to decode after it. The answer has log-probabilities
(natural logarithms): of every token of a window after its first (`prefill`), and of the tokens that the engine chose as
the most likely, one at a time with its cache (`decoding`). Or it names the package that is `missing`, or the `error`.

A request with a `converter` (`convert_hf_to_gguf.py` of llama.cpp) has a model folder, the file to write and its
precision instead. The answer is empty, or has the `error`.
"""

import importlib.metadata
import json
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# ruff: noqa: B905 - an engine's Python may be older than `strict`

HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [path for path in sys.path if path != HERE]  # the files beside this one are not the engine's

Answer = dict[str, list[list[Any]]]
FALLBACK = "gpt-2"  # pre-tokenizer where the converter to GGUF does not know the model's


class Mlx:
    """mlx-lm, on the CPU or with Metal, whichever mlx has."""

    def __init__(self, request: Any) -> None:
        import mlx.core
        from mlx_lm.utils import load_model

        self.mlx = mlx.core
        self.model = load_model(Path(request["model"]))[0]
        self.model.set_dtype(getattr(mlx.core, request["dtype"]))

    def reset(self) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self.cache = make_prompt_cache(self.model)

    def logits(self, tokens: list[int]) -> Any:
        import numpy

        logits = self.model(self.mlx.array([tokens]), cache=self.cache)[0]
        return numpy.array(logits.astype(self.mlx.float32))


class LlamaCpp:
    """llama.cpp through llama-cpp-python; `model` is a GGUF file, quantised first if the request names a type."""

    def __init__(self, request: Any) -> None:
        import llama_cpp

        longest = max(map(len, request["windows"])) + request["count"]
        exact = {} if request["dtype"] != "float32" else {"type_k": 0, "type_v": 0}  # of the cache: GGML_TYPE_F32
        file, quantised = request["model"], request.get("gguf_type")
        if quantised is not None:
            parameters = llama_cpp.llama_model_quantize_default_params()
            parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{quantised.upper()}")
            plain, file = file, f"{file}.{quantised}"
            if llama_cpp.llama_model_quantize(plain.encode(), file.encode(), parameters) != 0:
                raise RuntimeError(f"llama.cpp cannot quantise the model to {quantised}")
        self.model = llama_cpp.Llama(
            model_path=file, n_ctx=longest, n_batch=longest, n_ubatch=longest, logits_all=True,
            verbose=True, **exact, **request["options"],
        )  # fmt: skip

    def reset(self) -> None:
        self.model.reset()
        self.model._ctx.kv_cache_clear()

    def logits(self, tokens: list[int]) -> Any:
        self.model.eval(tokens)
        end = self.model.n_tokens
        return self.model.scores[end - len(tokens) : end].copy()


def score_logits(engine: Any, request: Any) -> Answer:
    """Return the scores of an engine that returns the logits of all tokens it reads and stores its state."""
    prefill, continued, decoding = [], [], []
    size = request["vocabulary"]  # an engine may pad it
    for window in request["windows"]:
        engine.reset()
        rows = log_softmax(engine.logits(window)[:, :size])
        prefill.append([float(row[token]) for row, token in zip(rows[:-1], window[1:])])
        engine.reset()
        tokens, scores, next_tokens = [], [], window[: request["prompt"]]
        for _ in range(request["count"]):
            row = log_softmax(engine.logits(next_tokens)[-1:, :size])[0]
            next_tokens = [int(row.argmax())]
            tokens += next_tokens
            scores.append(float(row.max()))
        continued.append(tokens)
        decoding.append(scores)
    return {"prefill": prefill, "continued": continued, "decoding": decoding}


def log_softmax(rows: Any) -> Any:
    import numpy

    rows = rows.astype(numpy.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    return rows - numpy.log(numpy.exp(rows).sum(axis=-1, keepdims=True))


def transformers(request: Any) -> Answer:
    """Score with the stock class. On a CPU, where fla's kernels do not run, transformers must not find fla."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if request["library"] == "fla":
        importlib.import_module("fla")
    elif device == "cpu":
        sys.modules["fla"] = None  # type: ignore[assignment]
    import transformers as library

    dtype = getattr(torch, request["dtype"])
    try:
        model = library.AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype)
    except ValueError:
        model = library.AutoModelForImageTextToText.from_pretrained(request["model"], dtype=dtype)
    model.to(device).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    prefill, continued, decoding = [], [], []
    for window in request["windows"]:  # their lengths may differ
        ids = torch.tensor([window], device=device)
        with torch.no_grad():
            rows = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
            output = model.generate(ids[:, : request["prompt"]], max_new_tokens=request["count"], **options)
        tokens, scores = output.sequences[0, request["prompt"] :], torch.cat(output.logits).float().log_softmax(-1)
        prefill.append(rows[0, :-1].gather(-1, ids[0, 1:, None])[:, 0].tolist())
        continued.append(tokens.tolist())
        decoding.append(scores.gather(-1, tokens[:, None])[:, 0].tolist())
    return {"prefill": prefill, "continued": continued, "decoding": decoding}


def vllm(request: Any) -> Answer:
    from vllm import LLM, SamplingParams

    windows, prompt, count = request["windows"], request["prompt"], request["count"]
    settings = {
        "dtype": request["dtype"], "max_model_len": max(map(len, windows)) + count, "enforce_eager": True,
        "enable_prefix_caching": False, **request["options"],
    }  # fmt: skip
    engine = LLM(model=request["model"], **settings)

    def generate(texts: list[list[int]], **sampling: Any) -> Any:
        parameters = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **sampling)
        return engine.generate([{"prompt_token_ids": text} for text in texts], parameters)

    def scores(tokens: Any, entries: Any) -> list[float]:
        return [entry[token].logprob for token, entry in zip(tokens, entries)]

    prefill = generate(windows, max_tokens=1, prompt_logprobs=0)
    decoding = generate([window[:prompt] for window in windows], max_tokens=count, logprobs=0)
    return {
        "prefill": [scores(window[1:], output.prompt_logprobs[1:]) for window, output in zip(windows, prefill)],
        "continued": [list(output.outputs[0].token_ids) for output in decoding],
        "decoding": [scores(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in decoding],
    }


def sglang(request: Any) -> Answer:
    from sglang import Engine

    windows, prompt, count = request["windows"], request["prompt"], request["count"]
    settings = {
        "dtype": request["dtype"], "context_length": max(map(len, windows)) + count, "skip_tokenizer_init": True,
        "disable_radix_cache": True, "disable_cuda_graph": True, **request["options"],
    }  # fmt: skip
    engine = Engine(model_path=request["model"], **settings)

    def generate(texts: list[list[int]], tokens: int) -> Any:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = engine.generate(input_ids=texts, sampling_params=sampling, return_logprob=True, logprob_start_len=0)
        return [output["meta_info"] for output in outputs]

    # entries are (log-probability, token, text); the first token of a window has none
    prefill = [info["input_token_logprobs"][1:] for info in generate(windows, 1)]
    decoding = [info["output_token_logprobs"] for info in generate([window[:prompt] for window in windows], count)]
    engine.shutdown()
    return {
        "prefill": [[entry[0] for entry in entries] for entries in prefill],
        "continued": [[entry[1] for entry in entries] for entries in decoding],
        "decoding": [[entry[0] for entry in entries] for entries in decoding],
    }


ENGINES: dict[str, Any] = {
    "transformers": (transformers, "transformers", ("transformers", "torch")),
    "mlx": (lambda request: score_logits(Mlx(request), request), "mlx-lm", ("mlx.core", "mlx_lm")),
    "llama.cpp": (lambda request: score_logits(LlamaCpp(request), request), "llama-cpp-python", ("llama_cpp",)),
    "vllm": (vllm, "vllm", ("vllm",)),
    "sglang": (sglang, "sglang", ("sglang",)),
}


def answer_to(request: Any) -> Any:
    """Return the scores, or the package that is missing, or the error."""
    run, package, modules = ENGINES[request["engine"]]
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return {"missing": name, "error": f"{type(error).__name__}: {error}"}
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # built from a source tree
        version = str(getattr(sys.modules[modules[-1]], "__version__", ""))
    return {"version": version, **attempt(run, request)}


def convert(request: Any) -> Answer:
    """Run llama.cpp's own converter, without heads for speculative decoding, which a model may lack.

    It knows tokenizers by a digest and stops at an unknown one, such as one that was trained here; then the tokens are
    written as for GPT-2, because engines get token ids and never text.
    """
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
    return {}


def with_fallback(original: Callable[[Any, Any], str]) -> Callable[[Any, Any], str]:
    def pre_tokenizer(model: Any, tokenizer: Any) -> str:
        try:
            return original(model, tokenizer)
        except NotImplementedError:
            return FALLBACK

    return pre_tokenizer


def attempt(work: Callable[[Any], Answer], request: Any) -> Any:
    """Return the answer of some work, or its error."""
    try:
        return work(request)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    request = json.loads(source.read_text(encoding="utf-8"))
    answer = attempt(convert, request) if "converter" in request else answer_to(request)
    target.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
