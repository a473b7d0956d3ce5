"""Token windows from text, which is read as a stream, tokenised piece by piece and packed end to end.

An end-of-text token stands after each document, where the tokenizer has one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from slimstate.data.documents import Reading
from slimstate.data.rows import Texts, renderer
from slimstate.system.errors import DataError, reason_of
from slimstate.system.json_files import JsonObject


@dataclass(frozen=True, kw_only=True)
class Windows:
    """`tokens` [samples, length], where they came from, and a digest that changes when any token does.

    `documents` says how those of the text were told apart, `usual` that each file or row was one.
    """

    tokens: Tensor
    source: str
    seed: int
    documents: str | None = None
    usual: bool = False

    @classmethod
    def of(cls, text: Reading, tokens: Tensor, seed: int = 0) -> Windows:
        """Windows of a text that was read."""
        return cls(tokens=tokens, source=text.source, seed=seed, documents=text.documents, usual=text.usual)

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.tokens.to(torch.int64).numpy().tobytes()).hexdigest()

    def describe(self) -> JsonObject:
        samples, length = self.tokens.shape
        return {"data": self.source, "documents": self.documents, "samples": samples, "length": length,
                "seed": self.seed, "digest": self.digest}  # fmt: skip

    def provenance(self) -> JsonObject:
        """The same for plans and evidence, as they always had it: how documents were told apart only where unusual."""
        return {name: value for name, value in self.describe().items() if name != "documents" or not self.usual}


def sample_windows(
    tokenizer: Any, text: str | Texts | Reading, *, samples: int = 128, length: int = 2048, seed: int = 0,
    fewest: int | None = None, enough: int = 1,
) -> Windows:  # fmt: skip
    """`samples` windows drawn by `seed` from the first 4 x `samples` of the text; with `fewest`, as many as it has.

    `fewest` is then the least that will do. `enough` is the least that an error may advise to ask for.
    """
    if samples < 1 or length < 2:
        raise DataError(f"{samples} samples of {length} tokens: at least 1 of 2 are needed")
    reading = Reading.of(text)
    pool = list(windows(tokenizer, reading, length, most=4 * samples))
    whole = [window for window in pool if len(window) == length]
    if fewest is not None and fewest <= len(whole) < samples:
        samples = len(whole)
    if len(whole) < samples:
        samples = samples if fewest is None else fewest
        way = f"use `samples` {len(whole)}, " if fewest is None and len(whole) >= enough else "give "
        found = sum(len(window) for window in pool)
        raise DataError(
            f"{reading.source} has {found:,} tokens; {samples} samples of {length} need {samples * length:,}: "
            f"{way}a shorter `length`, or more text"
        )
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))[:samples]
    tokens = torch.stack([whole[i] for i in order.tolist()])
    return Windows.of(reading, tokens, seed)


def windows(tokenizer: Any, text: str | Texts | Reading, length: int, *, most: int | None = None) -> Iterator[Tensor]:
    """The text packed into windows of `length` tokens, all or the first `most`; the last of the text may be shorter."""
    at_once = 0 if most is None else 2 * most * length  # a token has seldom fewer than two characters
    return islice(_packed(token_stream(tokenizer, text, at_once=at_once), length), most)


def _packed(stream: Iterator[list[int]], length: int) -> Iterator[Tensor]:
    buffer: list[int] = []
    for tokens in stream:
        buffer += tokens
        whole = len(buffer) // length * length
        yield from torch.tensor(buffer[:whole], dtype=torch.int32).view(-1, length).unbind()
        buffer = buffer[whole:]
    if buffer:
        yield torch.tensor(buffer, dtype=torch.int32)


def token_stream(tokenizer: Any, text: str | Texts | Reading, *, at_once: int = 0) -> Iterator[list[int]]:
    """Token ids piece by piece, with the end-of-text token after each document where the tokenizer has one.

    The first `at_once` characters are tokenised together, within the bounds of memory.
    """
    reading = Reading.of(text)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    empty = True
    for batch in reading.batches(at_once, renderer(tokenizer)):
        texts = [piece.text for piece in batch]
        empty = empty and not any(map(str.strip, texts))
        for piece, ids in zip(batch, _tokenised(tokenizer, texts), strict=True):
            yield list(ids) + (end if piece.ends else [])
    if empty:
        raise DataError(f"{reading.source} is empty")


def _tokenised(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """The tokens of each text; what a tokenizer from a damaged file has against it is told in a line."""
    try:
        found: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return found
    except Exception as error:  # of many kinds, Rust's among them
        raise DataError(f"the tokenizer of the model fails on the text: {reason_of(error)}") from error
