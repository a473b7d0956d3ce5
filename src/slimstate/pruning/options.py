"""What a cut can be told: the text it is calibrated on, how channels are judged, how it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimstate.data.documents import Reading, check_documents
from slimstate.data.rows import Texts, given_text
from slimstate.data.text import Windows, sample_windows, windows
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.selectors import Request
from slimstate.serving.engines import check_engine

SAMPLES, LENGTH = 128, 2048
FEW = 8  # windows of a text that is shorter than one


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Which text to run through the model, and the file that keeps or holds the result.

    Parameters:
        data: the text: a path, a dataset's name, or strings, chats or rows in a list or any iterable.
        samples: windows that are drawn from it; by default 128, or as many as it has.
        length: tokens in a window; by default 2048, or fewer where the text has not as many.
        seed: what they are drawn by.
        evidence: a file: where it is there, what it holds is used again without running the model; where not, it is
            written.
        documents: how those of the text are told apart, by default as it suggests: lines, blank, file or rows.

    Examples:
        >>> slimstate.prune("model", "slim", calibration=slimstate.Calibration(data="text.txt", samples=64, length=512))
    """

    data: str | Texts | None = None
    samples: int | None = None
    length: int | None = None
    seed: int = 0
    evidence: Path | None = None
    documents: str | None = None

    def __post_init__(self) -> None:
        check_documents(self.documents)
        if self.data is not None:
            object.__setattr__(self, "data", given_text(self.data))

    @classmethod
    def of(cls, given: Calibration | str | Path | Iterable[object] | None) -> Calibration:
        """A text alone is a calibration on it with all else as usual."""
        if isinstance(given, Calibration):
            return given
        return cls(data=None if given is None else given_text(given))

    @property
    def size(self) -> tuple[int, int]:
        """Windows, and tokens in each, where the text has enough."""
        return SAMPLES if self.samples is None else self.samples, LENGTH if self.length is None else self.length

    @property
    def tokens(self) -> int:
        return math.prod(self.size)

    def windows(self, tokenizer: Any) -> Windows | None:
        """The tokens to calibrate on; None where there is no text."""
        if self.data is None:
            return None
        reading = Reading(self.data, self.documents)
        length = _fitting_length(tokenizer, reading) if self.length is None else self.length
        fewest = 1 if self.samples is None else None
        return sample_windows(tokenizer, reading, samples=self.size[0], length=length, seed=self.seed, fewest=fewest)


def _fitting_length(tokenizer: Any, text: Reading) -> int:
    """That of usual windows; of a text that is shorter than one, such that it has a few."""
    first = next(windows(tokenizer, text, LENGTH, most=1), None)
    found = 0 if first is None else len(first)
    return LENGTH if found == LENGTH else max(2, found // FEW)


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """How channels are judged, and how the cut is made.

    Parameters:
        score: judge by keys and queries ("kq"), keys ("k") or queries ("q").
        seed: for what is drawn at random.
        f: the exchange threshold of drrqr.
        keep_norm_eps: leave the norm epsilon as it is, though the key dim sets the query scale.
        force: replace an output folder that exists, once the new one is whole.
        reconstruct: train every cut layer on the calibration text to give what it gave before.
        engine: the one that will serve the model: what it makes of the key dim is said before the cut.

    Examples:
        >>> better = slimstate.CutOptions(reconstruct=slimstate.ReconstructOptions())
        >>> slimstate.prune("model", "slim", key_dim=64, calibration="text.txt", options=better)
    """

    score: str = "kq"
    seed: int = 0
    f: float = 1.5
    keep_norm_eps: bool = False
    force: bool = False
    reconstruct: ReconstructOptions | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        self.request(1)
        if self.engine is not None:
            check_engine(self.engine)

    def request(self, key_dim: int, device: str = "cpu") -> Request:
        """The same as selectors take it."""
        return Request(keep=key_dim, score=self.score, seed=self.seed, f=self.f, device=device)
