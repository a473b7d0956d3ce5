"""What a reconstruction can be told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from slimstate.data.documents import Reading, check_documents
from slimstate.data.rows import Texts
from slimstate.data.text import Windows, sample_windows
from slimstate.records.reconstruction import ReconstructionSettings
from slimstate.system.errors import PlanError, SlimstateError

FEWEST = 10  # windows, of which one is held out
LEAST = 2  # that can be asked for
HELD_OUT = 0.1  # of the windows, which are never trained on
STEPS = {"cuda": 500, "cpu": 80}
BATCH = {"cuda": 16, "cpu": 4}
SAMPLES = {"cuda": 640, "cpu": 128}


@dataclass(frozen=True, kw_only=True)
class ReconstructOptions:
    """How every cut layer is trained.

    Parameters:
        steps: steps of Adam for every layer; by default 500 on a GPU and 80 on a CPU.
        batch: windows in a step; by default 16 on a GPU and 4 on a CPU.
        samples: windows of the text; by default up to 640 on a GPU and 128 on a CPU. A tenth is held out.
        length: tokens in a window.
        learning_rate: of Adam at its highest.
        seed: for the windows and their order.
        documents: how those of the text are told apart, by default as it suggests: lines, blank, file or rows.
        distill: steps of a distillation of the whole model afterwards, taken only where it helps; none by default.

    Examples:
        >>> slimstate.reconstruct("slim", "better", data="text.txt", options=slimstate.ReconstructOptions(steps=200))
    """

    steps: int | None = None
    batch: int | None = None
    samples: int | None = None
    length: int = 1024
    learning_rate: float = 2e-3
    seed: int = 0
    documents: str | None = None
    distill: int | None = None

    def __post_init__(self) -> None:
        check_documents(self.documents)
        for name in ("steps", "batch", "distill"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "steps" else 1):
                raise PlanError(f"`{name}` {value}: at least {0 if name == 'steps' else 1} is needed")
        if self.samples is not None and self.samples < LEAST:
            raise PlanError(f"`samples` {self.samples}: one window is held out, and at least one more is needed")
        if self.length < 2:
            raise PlanError(f"`length` {self.length}: windows of at least 2 tokens are needed")
        if not 0 < self.learning_rate < 1:
            raise PlanError(f"`learning_rate` {self.learning_rate}: it must lie between 0 and 1")

    def windows(self, tokenizer: Any, text: str | Texts, device: str) -> Windows:
        """The tokens to train on, drawn from a text."""
        samples = SAMPLES[device] if self.samples is None else self.samples
        reading, fewest = Reading(text, self.documents), min(FEWEST, samples) if self.samples is None else None
        return sample_windows(
            tokenizer, reading, samples=samples, length=self.length, seed=self.seed, fewest=fewest, enough=LEAST
        )

    def on(self, device: str, windows: Windows) -> ReconstructionSettings:
        """With what the device and the text decide."""
        return ReconstructionSettings(
            steps=STEPS[device] if self.steps is None else self.steps,
            batch=BATCH[device] if self.batch is None else self.batch,
            samples=len(windows.tokens),
            length=self.length,
            learning_rate=self.learning_rate,
            seed=self.seed,
        )


def held_out_of(windows: int) -> int:
    """How many of the windows are held out."""
    return max(1, round(HELD_OUT * windows))


@contextmanager
def within_a_cut() -> Iterator[None]:
    """Errors name options of a reconstruction as `reconstruct.length`, where a cut has a `length` of its own."""
    try:
        yield
    except SlimstateError as error:
        named = re.sub(r"`(steps|batch|samples|length|learning_rate)`", r"`reconstruct.\1`", str(error))
        raise type(error)(named) from error
