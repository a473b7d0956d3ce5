"""Train the mixer of one layer so that the layer gives what it gave before the cut.

    target  h  = layer(x)       of the uncut model, from its own hidden states
    student h' = layer'(x')     of the cut one, from those of the cut model so far, with its MLP or experts as they are
    error   |h' - h|^2 / |h - x|^2

Weights are kept only where they are better than those of the cut on windows that are held out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slimstate.reconstruction.steps import Errors, held_here, steps_of
from slimstate.records.reconstruction import LayerErrors, ReconstructionSettings
from slimstate.system import distributed

WARM_UP = 10  # steps
LEAST_RATE = 0.05  # of the learning rate, at the end
Step = Callable[[int, float], None]  # told the steps done and the error
LOOKS = 4  # at the windows that are held out
TOLD = 40  # times that a layer tells how far it is


@dataclass(frozen=True, kw_only=True)
class Task:
    """One layer to be fitted: the squared error summed over windows, and what it is relative to, a window."""

    weights: Mapping[str, torch.nn.Parameter]
    dtypes: Mapping[str, torch.dtype]  # what the weights will be written in
    error: Errors  # over windows of this process
    recordable: bool  # whether those take windows on the device, and need nothing from elsewhere
    power: float
    training: Tensor
    held_out: Tensor

    def measure(self, windows: Tensor) -> float:
        """The relative error over windows, those of all processes."""
        with torch.no_grad():
            total = sum((float(piece) for piece in self.error(held_here(windows))), 0.0)
        device = next(iter(self.weights.values())).device
        return float(distributed.sum_over_all(torch.tensor(total, device=device))) / (self.power * len(windows))

    def rounded(self) -> dict[str, Tensor]:
        """The weights as they will be written."""
        return {name: weight.detach().to(self.dtypes[name]).float() for name, weight in self.weights.items()}

    def put(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(values[name])


def fit(task: Task, settings: ReconstructionSettings, layer: int, step: Step) -> LayerErrors:
    """Train, and keep the best weights seen; `step` is told how far it is. Returns the errors."""
    seen = task.training[: len(task.held_out)]
    before, held_out_before = task.measure(seen), task.measure(task.held_out)
    cut = {name: weight.detach().clone() for name, weight in task.weights.items()}
    best, kept, kept_at = held_out_before, cut, 0
    for done in _steps(task, settings, layer, step):
        if (error := task.measure(task.held_out)) < best:
            best, kept_at = error, done
            kept = {name: weight.detach().clone() for name, weight in task.weights.items()}
    task.put(kept)
    if kept_at:
        task.put(task.rounded())
        best = task.measure(task.held_out)
        if not best < held_out_before:
            task.put(cut)
            best, kept_at = held_out_before, 0
    after = task.measure(seen) if kept_at else before
    return LayerErrors(
        layer=layer, before=before, after=after, held_out_before=held_out_before, held_out_after=best, step=kept_at
    )


def _steps(task: Task, settings: ReconstructionSettings, layer: int, step: Step) -> Iterator[int]:
    """Adam over batches drawn without repetition; gives way a few times, so that the weights can be judged.

    Between two looks nothing is asked of the device, so that a GPU never waits for it. Training ends at weights that
    are no numbers: no look has found them good.
    """
    weights = list(task.weights.values())
    steps = steps_of(weights, task.error, task.power, settings.steps, recordable=task.recordable)
    looks = {round(settings.steps * look / LOOKS) for look in range(1, LOOKS + 1)}
    batches = _batches(task.training, settings.batch, settings.seed + layer)
    told = max(1, settings.steps // TOLD)
    for number in range(1, settings.steps + 1):
        error = steps.take(next(batches), settings.learning_rate * _rate(number, settings.steps))
        if number % told == 0 or number == settings.steps:
            step(number, float(error))
        if number in looks:
            if not all(bool(weight.isfinite().all()) for weight in weights):
                return
            yield number


def _rate(number: int, steps: int) -> float:
    """A short warm-up, then a cosine down to a twentieth."""
    warm = min(1.0, number / WARM_UP)
    return warm * (LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * number / steps)))


def _batches(windows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Windows in a new order every time all were seen."""
    generator, queue = torch.Generator().manual_seed(seed), windows[:0]
    while True:
        while len(queue) < size:
            queue = torch.cat([queue, windows[torch.randperm(len(windows), generator=generator)]])
        yield queue[:size]
        queue = queue[size:]
