"""How well a model predicts a text: nats per token over windows that do not overlap, and the same in other units.

Perplexity per token depends on the tokenizer; bits per byte can be compared between models. Both follow from the mean
nats per token and from the numbers of tokens and bytes in the windows. Word perplexity: `evaluation/wikitext.py`.
"""

import math
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
from slimstate.system.value import Value

BATCH = {"cpu": 1, "cuda": 8}  # windows
MAX_NATS = 690.0  # whose perplexity fits into a record


def evaluation_windows(
    tokenizer: Any, text: str | Reading, length: int, max_tokens: int | None = None, option: str = "length"
) -> Windows:
    """Return all full windows of the first `max_tokens` tokens; one shorter window if these are fewer than `length`.

    `option` is the name of the length in errors.
    """
    for name, value in ((option, length), ("max_tokens", max_tokens)):
        if value is not None and value < 2:
            raise DataError(f"`{name}` must be at least 2, got {value}")
    length = length if max_tokens is None else min(length, max_tokens)
    count, reading = None if max_tokens is None else max_tokens // length, Reading.of(text)
    parts = list(windows(tokenizer, reading, length, max_windows=count))
    full = [window for window in parts if len(window) == length]
    if not full:
        size = sum(map(len, parts))
        problem = f"{reading.source} has {size} tokens, fewer than a window of {length}"
        raise DataError(f"{problem}: use `{option}` {size} or more text")
    return Windows.of(reading, torch.stack(full))


def window_nats(
    runtime: Runtime, tokens: Tensor, reporter: Reporter = SILENT, label: str = "evaluating"
) -> list[float]:
    """Return the mean negative log likelihood of every token but the first, of each window."""
    batches, sums = tokens.split(BATCH[runtime.device.type]), []
    for batch in reporter.track(batches, label, len(batches), batches[0].numel()):
        ids = batch.to(runtime.device, torch.long)
        with torch.inference_mode():
            logits = runtime.model(input_ids=ids, use_cache=False).logits
            for row, target in zip(logits[:, :-1], ids[:, 1:], strict=True):
                sums.append(float(F.cross_entropy(row.float(), target, reduction="sum").double()))
    if not all(map(math.isfinite, sums)):
        raise ModelError("the model's predictions are NaN or infinite")
    return [total / (tokens.shape[1] - 1) for total in sums]


def perplexity_of(nats: float) -> float:
    return math.exp(min(nats, MAX_NATS))


class TextSize(Value):
    """The tokens of windows, and the bytes of their text in UTF-8."""

    tokens: int
    bytes: int

    @classmethod
    def of(cls, tokenizer: Any, tokens: Tensor, *, contiguous: bool = True) -> "TextSize":
        """Count windows [N, T], which follow each other in the text if `contiguous`.

        Special tokens between documents are a line end.
        """
        documents: list[list[int]] = [[]]
        marks = {tokenizer.bos_token_id, tokenizer.eos_token_id}
        for number, window in enumerate(tokens.tolist()):
            if number and not contiguous:
                documents.append([])
            for token in window:
                if token not in marks:
                    documents[-1].append(token)
                elif documents[-1]:
                    documents.append([])
        text = "\n".join(tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in documents)
        return cls(tokens=tokens.numel(), bytes=len(text.encode()))

    def nats_per_byte(self, nats: float) -> float:
        return nats * self.tokens / max(1, self.bytes)

    def scores(self, nats: float) -> TextScores:
        """Return mean nats per token as bits per byte, with the size of the text."""
        return TextScores(bits_per_byte=self.nats_per_byte(nats) / math.log(2), **vars(self))
