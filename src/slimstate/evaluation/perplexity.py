"""How well a model predicts a text: perplexity over windows that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.data.text import Windows, windows
from slimstate.models.load import Runtime
from slimstate.system.errors import DataError, ModelError
from slimstate.system.progress import SILENT, Reporter

WINDOWS_AT_ONCE = {"cpu": 1, "cuda": 8}


def evaluation_windows(
    tokenizer: Any, text: str, length: int, max_tokens: int | None = None, named: str = "length"
) -> Windows:
    """All whole windows of the first `max_tokens` tokens; where those are fewer than a window, one of that many.

    `named` is what the length is called where it was asked for.
    """
    if length < 2:
        raise DataError(f"windows of {length} tokens predict nothing: `{named}` must be at least 2")
    if max_tokens is not None and max_tokens < 2:
        raise DataError(f"`max_tokens` {max_tokens}: at least 2 are needed")
    if max_tokens is not None:
        length = min(length, max_tokens)
    count = None if max_tokens is None else max_tokens // length
    found = list(windows(tokenizer, text, length, most=count))
    whole = [window for window in found if len(window) == length]
    if not whole:
        size = sum(map(len, found))
        raise DataError(f"{text} has {size} tokens, fewer than a window of {length}: use `{named}` {size} or more text")
    return Windows(tokens=torch.stack(whole), source=text, seed=0)


def mean_nats(runtime: Runtime, tokens: Tensor, reporter: Reporter = SILENT, label: str = "evaluating") -> float:
    """The mean negative log likelihood of every token but the first of each window."""
    batches = tokens.split(WINDOWS_AT_ONCE[runtime.device.type])
    total = 0.0
    for ids in reporter.track(batches, label, len(batches)):
        total += sum(_window_nats(runtime, ids.to(runtime.device, torch.long)))
    mean = total / (tokens.numel() - len(tokens))
    if not math.isfinite(mean):
        raise ModelError("the model's predictions are NaN or infinite")
    return mean


def perplexity_of(nats: float) -> float:
    return math.exp(min(nats, 700.0))


def _window_nats(runtime: Runtime, ids: Tensor) -> Iterator[float]:
    with torch.inference_mode():
        logits = runtime.model(input_ids=ids, use_cache=False).logits
        for row, target in zip(logits[:, :-1], ids[:, 1:], strict=True):
            yield float(F.cross_entropy(row.float(), target, reduction="sum").double())


def bytes_per_token(tokenizer: Any, tokens: Tensor) -> float:
    sample = tokens.flatten()
    return len(tokenizer.decode(sample.tolist(), clean_up_tokenization_spaces=False).encode()) / len(sample)
