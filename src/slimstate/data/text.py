"""Token windows from text: a .txt, .jsonl or .parquet file, .xz or .gz of one, a folder of them, or a `datasets` name.

Text is read as a stream of pieces, tokenised piece by piece and packed end to end into windows of equal length.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from slimstate.system import hub
from slimstate.system.errors import DataError
from slimstate.system.json_files import JsonObject

PIECE = 2**18  # characters of plain text that are tokenised as one
MOST = 32 * PIECE  # characters that are tokenised side by side
FORMATS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = {".xz": lzma.open, ".gz": gzip.open}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some text, and whether a document ends with it."""

    text: str
    ends: bool


@dataclass(frozen=True, kw_only=True)
class Windows:
    """`tokens` [samples, length], where they came from, and a digest that changes when any token does."""

    tokens: Tensor
    source: str
    seed: int

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.tokens.to(torch.int64).numpy().tobytes()).hexdigest()

    def describe(self) -> JsonObject:
        samples, length = self.tokens.shape
        return {"data": self.source, "samples": samples, "length": length, "seed": self.seed, "digest": self.digest}


def sample_windows(tokenizer: Any, source: str, *, samples: int = 128, length: int = 2048, seed: int = 0) -> Windows:
    """`samples` windows drawn by `seed` from the first 4 x `samples` of the text."""
    if samples < 1 or length < 2:
        raise DataError(f"{samples} samples of {length} tokens: at least 1 of 2 are needed")
    pool = list(windows(tokenizer, source, length, most=4 * samples))
    whole = [window for window in pool if len(window) == length]
    if len(whole) < samples:
        found = sum(len(window) for window in pool)
        raise DataError(
            f"{source} has {found:,} tokens; {samples} samples of {length} need {samples * length:,}: "
            f"use `samples` {max(1, len(whole))}, a shorter `length`, or more text"
        )
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))[:samples]
    return Windows(tokens=torch.stack([whole[i] for i in order.tolist()]), source=source, seed=seed)


def windows(tokenizer: Any, source: str, length: int, *, most: int | None = None) -> Iterator[Tensor]:
    """The text packed into windows of `length` tokens, all or the first `most`; the last of the text may be shorter."""
    at_once = 0 if most is None else 2 * most * length  # a token has seldom fewer than two characters
    return islice(_packed(token_stream(tokenizer, source, at_once=at_once), length), most)


def _packed(stream: Iterator[list[int]], length: int) -> Iterator[Tensor]:
    buffer: list[int] = []
    for tokens in stream:
        buffer += tokens
        whole = len(buffer) // length * length
        yield from torch.tensor(buffer[:whole], dtype=torch.int32).view(-1, length).unbind()
        buffer = buffer[whole:]
    if buffer:
        yield torch.tensor(buffer, dtype=torch.int32)


def token_stream(tokenizer: Any, source: str, *, at_once: int = 0) -> Iterator[list[int]]:
    """Token ids piece by piece, with the end-of-text token after each document where the tokenizer has one.

    The first `at_once` characters are tokenised together, within the bounds of memory.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    empty = True
    for batch in _growing_batches(pieces(source), at_once):
        texts = [piece.text for piece in batch]
        empty = empty and not any(map(str.strip, texts))
        for piece, ids in zip(
            batch, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"], strict=True
        ):
            yield list(ids) + (end if piece.ends else [])
    if empty:
        raise DataError(f"{source} is empty")


def _growing_batches(found: Iterator[Piece], first: int) -> Iterator[list[Piece]]:
    """Ever more pieces together, which a tokenizer spreads over the cores: little is read where little is needed."""
    batch: list[Piece] = []
    size, wanted = 0, min(max(PIECE, first), MOST)
    for piece in found:
        batch.append(piece)
        size += len(piece.text)
        if size >= wanted:
            yield batch
            batch, size, wanted = [], 0, min(2 * wanted, MOST)
    if batch:
        yield batch


def pieces(source: str) -> Iterator[Piece]:
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _format(file) is not None)
        if not files:
            raise DataError(f"{source} holds no {', '.join(FORMATS)} file")
        for file in files:
            yield from _read(file)
    elif path.is_file():
        yield from _read(path)
    elif _format(path) is not None or source.startswith(("/", "./", "../", "~")):
        raise DataError(f"no data at {source}")
    else:
        yield from _from_hub(source)


def _format(path: Path) -> str | None:
    """The format that a file's name tells, compressed or not."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSIONS]
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def _read(path: Path) -> Iterator[Piece]:
    kind = _format(path)
    if kind is None:
        raise DataError(f"{path}: not one of {', '.join(FORMATS)}, or .xz or .gz of one")
    reader = {".txt": _plain, ".jsonl": _json_lines, ".parquet": _parquet}[kind]
    opener = COMPRESSIONS.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:  # type: ignore[operator]
            yield from reader(file, path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _plain(file: IO[bytes], path: Path) -> Iterator[Piece]:
    """Pieces that end with a line, so that no word is torn."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    held = ""
    while block := text.read(PIECE):
        held += block
        cut = held.rfind("\n") + 1
        if cut:
            yield Piece(text=held[:cut], ends=False)
            held = held[cut:]
    yield Piece(text=held, ends=True)


def _json_lines(file: IO[bytes], path: Path) -> Iterator[Piece]:
    for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}: not a JSON object with a 'text' field") from error
        yield Piece(text=str(document), ends=True)


def _parquet(file: IO[bytes], path: Path) -> Iterator[Piece]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(file if path.suffix == ".parquet" else io.BytesIO(file.read()))
        for batch in table.iter_batches(batch_size=256, columns=["text"]):
            yield from (Piece(text=str(text), ends=True) for text in batch.column(0).to_pylist())
    except (arrow.ArrowException, KeyError, IndexError) as error:
        raise DataError(f"{path}: not a Parquet file with a 'text' column") from error


def _from_hub(name: str) -> Iterator[Piece]:
    """A dataset streamed from the hub: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, by default train; its `text` field."""
    from datasets import load_dataset

    if not hub.reachable():
        raise DataError(f"no file {name}, and the hub cannot be reached from here for a dataset of that name")
    repository, config, split = (*name.split(":", 2), "", "")[:3]
    try:
        for row in load_dataset(repository, config or None, split=split or "train", streaming=True):
            yield Piece(text=str(row["text"]), ends=True)
    except Exception as error:
        raise DataError(f"no file {name}, and no dataset of that name can be had: {hub.reason(error)}") from error
