"""How well a model predicts a text: perplexity over windows that do not overlap."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.checkpoint import Checkpoint
from slimstate.data import windows
from slimstate.errors import DataError, ModelError
from slimstate.record import versions
from slimstate.reporter import SILENT, Reporter
from slimstate.runtime import Runtime, load, load_tokenizer, pick_device, pick_dtype

WINDOWS_AT_ONCE = {"cpu": 1, "cuda": 8}


def evaluate(
    model: str | Path,
    text: str | Path,
    *,
    length: int = 1024,
    max_tokens: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Perplexity per token of `text`, with nats and bits per byte, as a record."""
    started = time.perf_counter()
    checkpoint = Checkpoint.open(model)
    pick_dtype(dtype, pick_device(device))
    tokens = evaluation_windows(load_tokenizer(checkpoint.folder), str(text), length, max_tokens)
    with reporter.waiting("loading the model"):
        runtime = load(checkpoint.folder, device=device, dtype=dtype)
    reporter.say(f"kernels: {runtime.kernels}")
    nats = mean_nats(runtime, tokens, reporter)
    per_token = _bytes_per_token(runtime.tokenizer, tokens)
    return {
        "model": checkpoint.source,
        "fingerprint": checkpoint.fingerprint,
        "text": str(text),
        "length": length,
        "windows": len(tokens),
        "tokens": tokens.numel(),
        "perplexity": math.exp(min(nats, 700.0)),
        "nats_per_token": nats,
        "nats_per_byte": nats / per_token,
        "bits_per_byte": nats / per_token / math.log(2),
        "kernels": runtime.kernels,
        "versions": versions(),
        "seconds": time.perf_counter() - started,
    }


def evaluation_windows(tokenizer: Any, text: str, length: int, max_tokens: int | None = None) -> Tensor:
    """All whole windows of the first `max_tokens` tokens; of a text shorter than one window, that one."""
    if length < 2:
        raise DataError(f"windows of {length} tokens predict nothing: --length must be at least 2")
    if max_tokens is not None and max_tokens < 2:
        raise DataError(f"--max-tokens {max_tokens}: at least 2 are needed")
    limit = None if max_tokens is None else -(-max_tokens // length)
    found = list(islice(windows(tokenizer, text, length), limit))
    if max_tokens is not None and found and sum(map(len, found)) > max_tokens:
        found[-1] = found[-1][: len(found[-1]) - (sum(map(len, found)) - max_tokens)]
    whole = [window for window in found if len(window) == length] or found[:1]
    if not whole or len(whole[0]) < 2:
        raise DataError(f"{text} has {sum(map(len, found))} tokens; at least 2 are needed")
    return torch.stack(whole)


def mean_nats(runtime: Runtime, tokens: Tensor, reporter: Reporter = SILENT) -> float:
    """The mean negative log likelihood of every token but the first of each window."""
    batches = tokens.split(WINDOWS_AT_ONCE[runtime.device.type])
    total = 0.0
    for ids in reporter.track(batches, "evaluating", len(batches)):
        total += sum(_window_nats(runtime, ids.to(runtime.device, torch.long)))
    mean = total / (tokens.numel() - len(tokens))
    if not math.isfinite(mean):
        raise ModelError("the model's predictions are NaN or infinite")
    return mean


def _window_nats(runtime: Runtime, ids: Tensor) -> Iterator[float]:
    with torch.inference_mode():
        logits = runtime.model(input_ids=ids, use_cache=False).logits
        for row, target in zip(logits[:, :-1], ids[:, 1:], strict=True):
            yield float(F.cross_entropy(row.float(), target, reduction="sum").double())


def _bytes_per_token(tokenizer: Any, tokens: Tensor) -> float:
    sample = tokens.flatten()
    return len(tokenizer.decode(sample.tolist(), clean_up_tokenization_spaces=False).encode()) / len(sample)
