"""Turn text into windows of tokens: read it as a stream, tokenise it piece by piece, and pack the tokens end to end.

An end-of-text token follows each document, if the tokenizer has one; or the tokenizer's own special tokens stand
around it.
"""

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from slimstate.data.documents import Reading
from slimstate.data.rows import Texts, renderer
from slimstate.system.errors import DataError, reason_of
from slimstate.system.json_files import JsonObject
from slimstate.system.value import Value

SPAN, FEWEST_SPANS, REPEATED = 32, 8, 0.5  # tokens of a span, spans of a window, share of spans that are repetitions


class Windows(Value):
    """Tokens [samples, length] and where they came from.

    `documents` is how the text was divided into documents, `one_per_source` whether each file or row is one.
    """

    tokens: Tensor
    source: str
    seed: int
    documents: str | None = None
    one_per_source: bool = False
    special_tokens: str = "end"

    @classmethod
    def of(cls, text: Reading, tokens: Tensor, seed: int = 0) -> "Windows":
        """Return windows with the provenance of the text that they were read from."""
        return cls(
            tokens=tokens, source=text.source, seed=seed, documents=text.documents, one_per_source=text.one_per_source,
            special_tokens=text.special_tokens,
        )  # fmt: skip

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.tokens.to(torch.int64).numpy().tobytes()).hexdigest()

    def describe(self) -> JsonObject:
        samples, length = self.tokens.shape
        return {"data": self.source, "documents": self.documents, "special_tokens": self.special_tokens,
                "samples": samples, "length": length, "seed": self.seed, "digest": self.digest}  # fmt: skip

    def provenance(self) -> JsonObject:
        """Return the description for plans and evidence, without values that are the default."""
        is_default = {"documents": self.one_per_source, "special_tokens": self.special_tokens == "end"}
        return {name: value for name, value in self.describe().items() if not is_default.get(name)}


def sample_windows(
    tokenizer: Any, text: str | Texts | Reading, *, samples: int = 128, length: int = 2048, seed: int = 0,
    min_samples: int | None = None, min_advice: int = 1,
) -> Windows:  # fmt: skip
    """Draw `samples` windows by `seed` from the first 4 x `samples` of the text.

    With `min_samples`, a shorter text gives fewer, but at least so many. `min_advice` is the smallest number of samples
    that an error may advise.
    """
    if samples < 1 or length < 2:
        raise DataError(f"`samples` must be at least 1 and `length` at least 2, got {samples} and {length}")
    reading = Reading.of(text)
    pool = list(windows(tokenizer, reading, length, max_windows=4 * samples))
    full = [window for window in pool if len(window) == length]
    if min_samples is not None and min_samples <= len(full) < samples:
        samples = len(full)
    if len(full) < samples:
        samples = samples if min_samples is None else min_samples
        advice = f"`samples` {len(full)}, " if min_samples is None and len(full) >= min_advice else ""
        raise DataError(
            f"{reading.source} has {sum(map(len, pool)):,} tokens; {samples} samples of {length} need"
            f" {samples * length:,}: use {advice}a shorter `length`, or more text"
        )
    order = torch.randperm(len(full), generator=torch.Generator().manual_seed(seed))[:samples]
    return Windows.of(reading, torch.stack([full[i] for i in order.tolist()]), seed)


def windows(
    tokenizer: Any, text: str | Texts | Reading, length: int, *, max_windows: int | None = None
) -> Iterator[Tensor]:
    """Yield the text as windows of `length` tokens, all or the first ones; the last of the text may be shorter."""
    first_batch = 0 if max_windows is None else 2 * max_windows * length  # a token seldom has fewer than two characters
    return islice(_pack(token_stream(tokenizer, text, first_batch=first_batch), length), max_windows)


def _pack(stream: Iterator[list[int]], length: int) -> Iterator[Tensor]:
    buffer: list[int] = []
    for tokens in stream:
        buffer += tokens
        end = len(buffer) // length * length
        yield from torch.tensor(buffer[:end], dtype=torch.int32).view(-1, length).unbind()
        buffer = buffer[end:]
    if buffer:
        yield torch.tensor(buffer, dtype=torch.int32)


def token_stream(tokenizer: Any, text: str | Texts | Reading, *, first_batch: int = 0) -> Iterator[list[int]]:
    """Yield token ids piece by piece, with special tokens around each document.

    About `first_batch` characters are tokenised together at first.
    """
    reading = Reading.of(text)
    before, after = _special_tokens(tokenizer, reading.special_tokens)
    is_empty = starts = True
    for batch in reading.batches(first_batch, renderer(tokenizer)):
        texts = [piece.text for piece in batch]
        is_empty = is_empty and not any(map(str.strip, texts))
        for piece, ids in zip(batch, _tokenise(tokenizer, texts), strict=True):
            yield (before if starts else []) + list(ids) + (after if piece.ends else [])
            starts = piece.ends
    if is_empty:
        raise DataError(f"{reading.source} is empty")


def _special_tokens(tokenizer: Any, kind: str) -> tuple[list[int], list[int]]:
    """Return the tokens before and after a document: an end-of-text token, or those of the tokenizer itself."""
    if kind == "end":
        return [], [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    (bare,), marked = _tokenise(tokenizer, ["a"]), list(tokenizer("a", verbose=False)["input_ids"])
    start = next(place for place in range(len(marked)) if marked[place : place + len(bare)] == list(bare))
    return marked[:start], marked[start + len(bare) :]


def _tokenise(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the tokens of each text; raise a `DataError` if the tokenizer fails, perhaps of a damaged file."""
    try:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
    except Exception as error:  # of many kinds, also of Rust
        raise DataError(f"the tokenizer of the model fails on the text: {reason_of(error)}") from error


def repeating(windows: Tensor, seed: int) -> Tensor:
    """Return the windows [n, length] with half of their spans replaced by earlier ones of the same window."""
    length = windows.shape[1]
    size = max(1, min(SPAN, length // FEWEST_SPANS))
    spans = list(windows.split(size, dim=1))
    generator = torch.Generator().manual_seed(seed)
    for place in range(1, length // size):
        earlier = torch.randint(place, (len(windows),), generator=generator)
        repeats = torch.rand(len(windows), 1, generator=generator) < REPEATED
        copies = torch.stack(spans[:place])[earlier, torch.arange(len(windows))]
        spans[place] = copies.where(repeats, spans[place])
    return torch.cat(spans, dim=1)
