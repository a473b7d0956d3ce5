"""The tokens a training runs on: read once, kept as a file of equal windows, and visited in an order the seed decides.

Sample i of a training is the same window whatever the number of processes, and after any number of restarts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from slimstate.data.documents import Reading
from slimstate.data.text import windows
from slimstate.system.atomic import staged_file, write_text, writing
from slimstate.system.errors import DataError, quoted, reason_of
from slimstate.system.json_files import JsonObject, read_json

TOKENS = "tokens.int32"
ABOUT = "tokens.json"
MOST_HELD_OUT = 64


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Windows of `length` tokens in a file; every so many of them is held out of training."""

    path: Path
    source: str
    length: int
    count: int
    held_out: int
    digest: str
    documents: str | None = None

    @classmethod
    def collect(
        cls, tokenizer: Any, text: str | Reading, length: int, samples: int, held_out: int, folder: Path
    ) -> Corpus:
        """The first `samples` + `held_out` windows of a text, or as many as it has, as a file in `folder`.

        Of a text with fewer, fewer are held out.
        """
        reading, found, digest = Reading.of(text), 0, hashlib.sha256()
        path = folder / TOKENS
        with writing(path), staged_file(path) as partial, partial.open("wb") as file:
            for window in windows(tokenizer, reading, length, most=samples + held_out):
                if len(window) == length:
                    data = window.numpy().tobytes()
                    file.write(data)
                    digest.update(data)
                    found += 1
        if found < samples + held_out:
            held_out = min(held_out, held_out_count(found))
        if found < 1 + held_out:
            raise DataError(
                f"{reading.source} has {found} windows of {length} tokens; at least {1 + held_out} are needed: "
                "give more text or a shorter `length`"
            )
        about = {"source": reading.source, "length": length, "count": found, "held_out": held_out}
        about |= {"digest": f"sha256:{digest.hexdigest()}", "documents": reading.documents}
        write_text(folder / ABOUT, json.dumps(about) + "\n")
        return cls.open(folder)

    @classmethod
    def of_windows(cls, training: Tensor, held_out: Tensor, source: str, documents: str | None, folder: Path) -> Corpus:
        """Windows that are there already, as a file in `folder`."""
        count, length = len(training) + len(held_out), training.shape[1]
        corpus = cls(
            path=folder / TOKENS, source=source, length=length, count=count, held_out=len(held_out), digest="",
            documents=documents,
        )  # fmt: skip
        tokens = np.empty((count, length), np.int32)
        tokens[corpus.training_windows], tokens[corpus._held_out_places()] = training.numpy(), held_out.numpy()
        with writing(corpus.path), staged_file(corpus.path) as partial:
            partial.write_bytes(tokens.tobytes())
        about = {**corpus.describe(), "digest": f"sha256:{hashlib.sha256(tokens.tobytes()).hexdigest()}"}
        about |= {"source": about.pop("data"), "count": about.pop("windows")}
        write_text(folder / ABOUT, json.dumps(about) + "\n")
        return cls.open(folder)

    @staticmethod
    def lies_in(folder: Path) -> bool:
        return (folder / ABOUT).exists()

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """What `collect` left in a folder."""
        try:
            corpus = cls(path=folder / TOKENS, **read_json(folder / ABOUT, DataError))
            whole = corpus.path.stat().st_size == 4 * corpus.count * corpus.length
        except (DataError, OSError, ValueError, TypeError) as error:
            raise DataError(f"{quoted(folder)} holds no training tokens: {reason_of(error)}") from error
        if not whole:
            raise DataError(f"{corpus.path} is not whole: remove {folder} and start again")
        return corpus

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """All windows [count, length], mapped from the file."""
        return np.memmap(self.path, np.int32, "r", shape=(self.count, self.length))

    @property
    def held_out_windows(self) -> Tensor:
        """The windows that are never trained on, spread over the text."""
        return torch.from_numpy(self.tokens[self._held_out_places()].copy())

    @property
    def training_windows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The places of all the others."""
        return np.setdiff1d(np.arange(self.count), self._held_out_places())

    def _held_out_places(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return (np.arange(self.held_out) * 2 + 1) * self.count // max(1, 2 * self.held_out)

    def describe(self) -> JsonObject:
        return {"data": self.source, "documents": self.documents, "length": self.length, "windows": self.count,
                "held_out": self.held_out, "digest": self.digest}  # fmt: skip


def held_out_count(samples: int) -> int:
    """How many windows to keep aside to measure on."""
    return min(MOST_HELD_OUT, max(1, samples // 64))


class Schedule(Dataset[dict[str, Tensor]]):
    """`samples` windows in the order of training: every epoch visits all of them in an order of its own."""

    def __init__(self, corpus: Corpus, samples: int, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self.tokens, self.places = corpus.tokens, corpus.training_windows
        self._epoch, self._order = -1, np.empty(0, np.int64)

    @property
    def epochs(self) -> float:
        return self.samples / len(self.places)

    def order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The places in the order of an epoch; no epoch of one seed is that of another."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.places)
        return self._order

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        if not 0 <= sample < self.samples:
            raise IndexError(sample)
        epoch, position = divmod(sample, len(self.places))
        place = int(self.order(epoch)[position])
        ids = torch.from_numpy(self.tokens[place].astype(np.int64))
        return {"input_ids": ids, "place": torch.tensor(place)}
