"""Options of a reconstruction."""

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from slimstate.system.options import Options

if TYPE_CHECKING:
    from slimstate.data.documents import Reading
    from slimstate.data.text import Windows
    from slimstate.records.parts import ReconstructionSettings

MIN_WINDOWS = 10  # of a text without `samples`; one of them is held out
HELD_OUT, MOST_HELD_OUT = 0.1, 32  # share and number of the windows that are never trained on
STEPS = {"cuda": 500, "cpu": 80}
BATCH = {"cuda": 16, "cpu": 4}
SAMPLES = {"cuda": 640, "cpu": 128}


class ReconstructOptions(Options):
    """Reconstruction"""

    steps: Annotated[int | None, Meta(ge=0)] = None
    """Training steps for every layer; default: 500 on a GPU, 80 on a CPU."""
    batch: Annotated[int | None, Meta(ge=1)] = None
    """Windows per step, at most those that are trained on; default: 16 on a GPU, 4 on a CPU."""
    samples: Annotated[int | None, Meta(ge=2)] = None
    """Windows of the text, a tenth of which, 32 at most, is held out; default: up to 640 on a GPU, 128 on a CPU."""
    length: Annotated[int, Meta(ge=2)] = 1024
    """Tokens per window."""
    learning_rate: Annotated[float | None, Meta(gt=0, lt=1)] = None
    """Highest learning rate of Adam; default: by the width of the layers and a short trial on held-out windows."""

    def check(self) -> None:
        self.refuse(("learning_rate",), "needs `steps` above 0", unless=self.steps != 0)

    def windows(self, tokenizer: Any, reading: "Reading", seed: int, device: str) -> "Windows":
        """Return the windows to train on, drawn from a text."""
        from slimstate.data.text import sample_windows

        samples = SAMPLES[device] if self.samples is None else self.samples
        fewest = min(MIN_WINDOWS, samples) if self.samples is None else None
        return sample_windows(
            tokenizer, reading, samples=samples, length=self.length, seed=seed, min_samples=fewest, min_advice=2
        )

    def settings(self, device: str, windows: "Windows") -> "ReconstructionSettings":
        """Return the settings of a run, including what the device and the text decide."""
        from slimstate.records.parts import ReconstructionSettings

        samples = len(windows.tokens)
        return ReconstructionSettings(
            steps=STEPS[device] if self.steps is None else self.steps,
            batch=min(BATCH[device] if self.batch is None else self.batch, samples - count_held_out(samples)),
            samples=samples,
            length=self.length,
            learning_rate=self.learning_rate,
            seed=windows.seed,
        )


def count_held_out(windows: int) -> int:
    """Return how many of the windows are held out."""
    return min(MOST_HELD_OUT, max(1, round(HELD_OUT * windows)))
