"""How well a model predicts a text: nats per token over windows that do not overlap, and the same in other units.

Perplexity per token depends on the tokenizer; per word and as bits per byte it can be compared between models. All
rest on the mean nats per token and on how many tokens, words and bytes the windows have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.data.documents import Reading
from slimstate.data.text import Windows, windows
from slimstate.models.load import Runtime
from slimstate.records.parts import TextScores
from slimstate.system.errors import DataError, ModelError
from slimstate.system.progress import SILENT, Reporter

WINDOWS_AT_ONCE = {"cpu": 1, "cuda": 8}
LARGEST = 690.0  # nats whose perplexity a record holds


def evaluation_windows(
    tokenizer: Any, text: str | Reading, length: int, max_tokens: int | None = None, named: str = "length"
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
    count, reading = None if max_tokens is None else max_tokens // length, Reading.of(text)
    found = list(windows(tokenizer, reading, length, max_windows=count))
    whole = [window for window in found if len(window) == length]
    if not whole:
        size = sum(map(len, found))
        few = f"{reading.source} has {size} tokens, fewer than a window of {length}"
        raise DataError(f"{few}: use `{named}` {size} or more text")
    return Windows.of(reading, torch.stack(whole))


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
    return math.exp(min(nats, LARGEST))


def _window_nats(runtime: Runtime, ids: Tensor) -> Iterator[float]:
    with torch.inference_mode():
        logits = runtime.model(input_ids=ids, use_cache=False).logits
        for row, target in zip(logits[:, :-1], ids[:, 1:], strict=True):
            yield float(F.cross_entropy(row.float(), target, reduction="sum").double())


@dataclass(frozen=True, kw_only=True)
class TextSize:
    """How many tokens, words and bytes windows have; words as lm-eval's `wikitext` counts them, bytes of UTF-8."""

    tokens: int
    words: int
    bytes: int

    @classmethod
    def of(cls, tokenizer: Any, tokens: Tensor, *, apart: bool = False) -> TextSize:
        """Of windows [N, T] that lie end to end in a text, or `apart`. An end-of-text token is a line end."""
        documents: list[list[int]] = [[]]
        for number, window in enumerate(tokens.tolist()):
            if apart and number:
                documents.append([])
            for token in window:
                if token == tokenizer.eos_token_id:
                    documents.append([])
                else:
                    documents[-1].append(token)
        decoded = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in documents)
        text = "\n".join(decoded)
        return cls(tokens=tokens.numel(), words=len(re.split(r"\s+", text)), bytes=len(text.encode()))

    def nats_per_byte(self, nats: float) -> float:
        return nats * self.tokens / max(1, self.bytes)

    def predicted(self, nats: float) -> TextScores:
        """Mean nats per token in other units. A perplexity per word that no record holds is not told."""
        per_word = nats * self.tokens / self.words
        return TextScores(
            word_perplexity=math.exp(per_word) if per_word <= LARGEST else None,
            bits_per_byte=self.nats_per_byte(nats) / math.log(2),
            tokens=self.tokens,
            words=self.words,
            bytes=self.bytes,
        )
