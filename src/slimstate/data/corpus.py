"""The tokens of a training: a file of equal windows, visited in an order that depends on the seed alone.

Sample i of a training is the same window for any number of processes and after any number of restarts.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import Self

from slimstate.data.documents import Reading
from slimstate.data.text import windows
from slimstate.system.atomic import staged_file, write_text, writing
from slimstate.system.errors import DataError, quoted, reason_of
from slimstate.system.json_files import JsonObject, read_json
from slimstate.system.value import Value

TOKENS = "tokens.int32"
ABOUT = "tokens.json"
MAX_HELD_OUT_WINDOWS = 64
Places = np.ndarray[Any, np.dtype[np.int64]]


class Corpus(Value):
    """Windows of `length` tokens in a file; some of them, spread over the text, are held out of training."""

    path: Path
    source: str
    length: int
    count: int
    held_out: int
    digest: str
    documents: str | None = None

    @classmethod
    def collect(
        cls, tokenizer: Any, text: str | Reading, length: int, samples: int, held_out: int, folder: Path, *,
        exact: bool = False,
    ) -> Self:  # fmt: skip
        """Write the first `samples` + `held_out` windows of a text to `folder`, or as many as it has.

        Of a shorter text fewer are held out, unless their number must be `exact`.
        """
        reading = Reading.of(text)
        tokens = windows(tokenizer, reading, length, max_windows=samples + held_out)
        count, digest = _write_tokens(folder, (window for window in tokens if len(window) == length))
        if count < samples + held_out and not exact:
            held_out = min(held_out, held_out_count(count))
        if count < 1 + held_out:
            raise DataError(
                f"{reading.source} has {count} of the {1 + held_out} windows of {length} tokens that are needed: "
                "use more text or a shorter `length`"
            )
        about = {"source": reading.source, "documents": reading.documents, "digest": digest}
        return cls._finish(folder, {**about, "length": length, "count": count, "held_out": held_out})

    @classmethod
    def of_windows(cls, training: Tensor, held_out: Tensor, source: str, documents: str | None, folder: Path) -> Self:
        """Write windows that are in memory to `folder`."""
        length, held_out_windows = training.shape[1], iter(held_out)
        count, training_windows = len(training) + len(held_out), iter(training)
        places = set(held_out_places(count, len(held_out)).tolist())
        ordered = (next(held_out_windows if place in places else training_windows) for place in range(count))
        about = {"source": source, "documents": documents, "digest": _write_tokens(folder, ordered)[1]}
        return cls._finish(folder, {**about, "length": length, "count": count, "held_out": len(held_out)})

    @classmethod
    def _finish(cls, folder: Path, about: JsonObject) -> Self:
        write_text(folder / ABOUT, json.dumps(about) + "\n")
        return cls.open(folder)

    @staticmethod
    def exists_in(folder: Path) -> bool:
        return (folder / ABOUT).exists()

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the windows that were written to a folder."""
        try:
            corpus = cls(path=folder / TOKENS, **read_json(folder / ABOUT, DataError))
            is_complete = corpus.path.stat().st_size == 4 * corpus.count * corpus.length
        except (DataError, OSError, ValueError, TypeError) as error:
            raise DataError(f"{quoted(folder)} holds no training tokens: {reason_of(error)}") from error
        if not is_complete:
            raise DataError(f"{corpus.path} is not complete: remove {folder} and start again")
        return corpus

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """All windows [count, length], mapped from the file."""
        return np.memmap(self.path, np.int32, "r", shape=(self.count, self.length))

    @property
    def held_out_windows(self) -> Tensor:
        """The windows that are never trained on, spread over the text."""
        return torch.from_numpy(self.tokens[held_out_places(self.count, self.held_out)].copy())

    @property
    def training_windows(self) -> Places:
        return np.setdiff1d(np.arange(self.count), held_out_places(self.count, self.held_out))

    def describe(self) -> JsonObject:
        return {"data": self.source, "documents": self.documents, "length": self.length, "windows": self.count,
                "held_out": self.held_out, "digest": self.digest}  # fmt: skip


def _write_tokens(folder: Path, tokens: Iterable[Tensor]) -> tuple[int, str]:
    """Write windows to a folder; return their number and a digest of them."""
    path, count, digest = folder / TOKENS, 0, hashlib.sha256()
    with writing(path), staged_file(path) as staged, staged.open("wb") as file:
        for window in tokens:
            data = window.to(torch.int32).numpy().tobytes()
            file.write(data)
            digest.update(data)
            count += 1
    return count, f"sha256:{digest.hexdigest()}"


def held_out_count(samples: int) -> int:
    """Return how many windows to hold out for measuring."""
    return min(MAX_HELD_OUT_WINDOWS, max(1, samples // 64))


def held_out_places(count: int, held_out: int) -> Places:
    """Return the places of the windows that are held out, spread evenly over all `count`."""
    return (np.arange(held_out) * 2 + 1) * count // max(1, 2 * held_out)


class Schedule(Dataset[dict[str, Tensor]]):
    """The `samples` windows of a training in order; every epoch visits all windows in a new order."""

    def __init__(self, corpus: Corpus, samples: int, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self.tokens, self.places = corpus.tokens, corpus.training_windows
        self._epoch, self._order = -1, np.empty(0, np.int64)

    @property
    def epochs(self) -> float:
        return self.samples / len(self.places)

    def order(self, epoch: int) -> Places:
        """Return the places in the order of an epoch, which is another one for every epoch and seed."""
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
        return {"input_ids": torch.from_numpy(self.tokens[place].astype(np.int64)), "place": torch.tensor(place)}
