"""What a cut can be told: the text it is calibrated on, how channels are judged, how it is made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimstate.data.documents import Reading, check_documents
from slimstate.data.rows import Texts, given_text
from slimstate.data.text import Windows, sample_windows
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.selectors import Request
from slimstate.serving.engines import check_engine


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Which text to run through the model, and the file that keeps or holds the result.

    `samples` windows of `length` tokens are drawn by `seed` from the text `data`. `evidence` is a file: where it is
    there, what it holds is used again without running the model; where not, it is written. `documents` says how those
    of the text are told apart, by default as it suggests: lines, blank, file or rows.
    """

    data: str | Texts | None = None
    samples: int = 128
    length: int = 2048
    seed: int = 0
    evidence: Path | None = None
    documents: str | None = None

    def __post_init__(self) -> None:
        check_documents(self.documents)

    @classmethod
    def of(cls, given: Calibration | str | Path | Iterable[object] | None) -> Calibration:
        """A text alone is a calibration on it with all else as usual."""
        if isinstance(given, Calibration):
            return given
        return cls(data=None if given is None else given_text(given))

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    def windows(self, tokenizer: Any) -> Windows | None:
        """The tokens to calibrate on; None where there is no text."""
        if self.data is None:
            return None
        reading = Reading(self.data, self.documents)
        return sample_windows(tokenizer, reading, samples=self.samples, length=self.length, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """How channels are judged, and how the cut is made.

    `score` judges by keys and queries ("kq"), keys ("k") or queries ("q"); `f` is the exchange threshold of drrqr.
    With `keep_norm_eps` the norm epsilon stays as it is, though the key dim sets the query scale. `force` replaces an
    output folder that exists, once the new one is whole. With `reconstruct` every cut layer is trained on the
    calibration text to give what it gave before. `engine` is the one that will serve the model: what it makes of the
    key dim is said before the cut.
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
