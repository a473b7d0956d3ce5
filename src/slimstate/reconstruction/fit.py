"""Train the mixer of one cut layer to match the output of the uncut layer.

    target  h  = layer(x)       of the uncut model, from its own hidden states
    student h' = layer'(x')     of the cut model, from its hidden states so far; its MLP or experts do not change
    error   |h' - h|^2 / |h - x|^2

The trained weights are used only if they are better than those of the cut on held-out windows.

A layer of a small model is hundreds of small kernels, and launching them takes longer than running them. On a GPU, a
CUDA graph launches a whole step at once: forward, backward and Adam. A step that reads from the device cannot be
captured and is launched kernel by kernel.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimstate.models.memory import Pieces
from slimstate.records.parts import ReconstructionSettings
from slimstate.records.training import LayerErrors
from slimstate.system import distributed
from slimstate.system.value import Value

WARM_UP = 10  # steps
MIN_RATE = 0.05  # of the learning rate, at the end
OnStep = Callable[[int, float], None]  # called with the number of steps and the error
VALIDATIONS = 4  # on the held-out windows
UPDATES = 40  # of the progress, per layer
Errors = Callable[[Tensor], Iterator[Tensor]]  # yields the sum of squared errors of each piece of the windows
FIRST_BETA, MIN_SECOND_BETA = 0.9, 0.9
SECOND_MOMENT_SHARE = 0.2  # of all steps, over which Adam's second moment averages
STEPS_BEFORE_CAPTURE = 3  # in which kernels are compiled and Adam creates its moments


class Task(Value):
    """One layer to train; `error` sums the squared error over windows, relative to `power` per window."""

    weights: Mapping[str, torch.nn.Parameter]
    dtypes: Mapping[str, torch.dtype]  # of the files
    error: Errors  # over windows of this process
    pieces: Pieces  # that `error` computes one after another
    capturable: bool  # as a CUDA graph: `error` takes windows on the device and copies nothing there
    power: float
    training: Tensor
    held_out: Tensor

    def measure(self, windows: Tensor) -> float:
        """Return the relative error over windows of all processes."""
        with torch.no_grad():
            total = self.pieces.run(lambda: sum((float(piece) for piece in self.error(local_windows(windows))), 0.0))
        device = next(iter(self.weights.values())).device
        return float(distributed.sum_over_all(torch.tensor(total, device=device))) / (self.power * len(windows))

    def copy(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    def load(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(values[name])


def fit(task: Task, settings: ReconstructionSettings, layer: int, rate: float, on_step: OnStep) -> LayerErrors:
    """Train a layer at a learning rate, leave the best weights in it, and return the errors before and after."""
    sample = task.training[: len(task.held_out)]
    before, held_out_before = task.measure(sample), task.measure(task.held_out)
    cut = best_weights = task.copy()
    best, best_step = held_out_before, 0
    for step in _train(task, settings, layer, rate, on_step) if math.isfinite(held_out_before) else ():
        if (error := task.measure(task.held_out)) < best:
            best, best_step, best_weights = error, step, task.copy()
    # rounded as the files will have them
    task.load({name: weight.to(task.dtypes[name]).float() for name, weight in best_weights.items()})
    if best_step:
        best = task.measure(task.held_out)
    if not best_step or not best < held_out_before:
        task.load(cut)
        best, best_step = held_out_before, 0
    after = task.measure(sample) if best_step else before
    return LayerErrors(
        layer=layer, before=before, after=after, held_out_before=held_out_before, held_out_after=best, step=best_step,
        learning_rate=rate if best_step else None,
    )  # fmt: skip


def _train(task: Task, settings: ReconstructionSettings, layer: int, rate: float, on_step: OnStep) -> Iterator[int]:
    """Run Adam over batches drawn without repetition; yield a few times, so that the weights can be validated.

    Between two validations nothing is read from the device, so that a GPU never waits. Training ends where weights
    are not finite any more.
    """
    weights = list(task.weights.values())
    steps = steps_of(weights, task.error, task.power, settings.steps, capturable=task.capturable)
    validations = {round(settings.steps * number / VALIDATIONS) for number in range(1, VALIDATIONS + 1)}
    batches = _batches(task.training, settings.batch, settings.seed + layer)
    interval = max(1, settings.steps // UPDATES)
    for number in range(1, settings.steps + 1):
        batch, factor = next(batches), _rate(number, settings.steps)
        error = task.pieces.run(partial(steps.take, batch, rate * factor))
        if number % interval == 0 or number == settings.steps:
            on_step(number, float(error))
        if number in validations:
            if not all(bool(weight.isfinite().all()) for weight in weights):
                return
            yield number


def _rate(number: int, steps: int) -> float:
    """Return the factor of the learning rate: a short warm-up, then a cosine down to MIN_RATE."""
    warm = min(1.0, number / WARM_UP)
    return warm * (MIN_RATE + (1 - MIN_RATE) * 0.5 * (1 + math.cos(math.pi * number / steps)))


def _batches(windows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of windows, in a new order every time all were seen."""
    generator, queue = torch.Generator().manual_seed(seed), windows[:0]
    while True:
        while len(queue) < size:
            queue = torch.cat([queue, windows[torch.randperm(len(windows), generator=generator)]])
        yield queue[:size]
        queue = queue[size:]


class Steps:
    """Take `count` steps of Adam on the errors over windows, relative to `power` per window."""

    def __init__(
        self, weights: Sequence[torch.nn.Parameter], errors: Errors, power: float, count: int, **adam: Any
    ) -> None:
        self.weights, self.errors, self.power = weights, errors, power
        second_beta = max(MIN_SECOND_BETA, 1 - 1 / (SECOND_MOMENT_SHARE * max(1, count)))
        self.adam = torch.optim.Adam(weights, betas=(FIRST_BETA, second_beta), **adam)

    def take(self, windows: Tensor, rate: float) -> Tensor:
        """Take one step at a learning rate; return the error before it over the windows of this process."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        return self._step(local_windows(windows), len(windows))

    def _step(self, windows: Tensor, count: int) -> Tensor:
        self.adam.zero_grad(set_to_none=True)
        losses = []
        for piece in self.errors(windows):
            part = piece / (self.power * count)
            part.backward()  # type: ignore[no-untyped-call]
            losses.append(part.detach())
        for weight in self.weights if distributed.count() > 1 else ():
            if weight.grad is None:  # this process has no window of the batch
                weight.grad = torch.zeros_like(weight)
            distributed.sum_over_all(weight.grad)
        self.adam.step()
        return torch.stack(losses).sum() if losses else torch.zeros(())


class CapturedSteps(Steps):
    """Take steps on one GPU by a CUDA graph, where the step can be captured."""

    def __init__(self, weights: Sequence[torch.nn.Parameter], errors: Errors, power: float, count: int) -> None:
        device = weights[0].device
        self.rate = torch.zeros((), device=device)
        super().__init__(weights, errors, power, count, lr=self.rate, fused=True, capturable=True)
        self.windows, self.error = torch.empty(0, device=device), torch.zeros((), device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.count, self.stream = 0, torch.cuda.Stream(device)

    def take(self, windows: Tensor, rate: float) -> Tensor:
        self.rate.fill_(rate)
        if self.count == 0:
            self.windows = windows.to(self.rate.device)
        self.windows.copy_(windows)
        self.count += 1
        if self.count == STEPS_BEFORE_CAPTURE + 1:
            self._capture()
        if self.graph is None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):  # of its own, as PyTorch requires before a capture
                error = self._step(self.windows, len(self.windows))
            torch.cuda.current_stream().wait_stream(self.stream)
            return error
        self.graph.replay()
        return self.error

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph has memory of its own
        try:
            with torch.cuda.graph(graph):
                self.error = self._step(self.windows, len(self.windows))
        except RuntimeError:
            torch.cuda.synchronize()
            return
        self.graph = graph


def steps_of(
    weights: Sequence[torch.nn.Parameter], errors: Errors, power: float, count: int, *, capturable: bool
) -> Steps:
    """Return the fastest steps for this device; `capturable` is whether a step can be captured as a CUDA graph."""
    alone = distributed.count() == 1 and weights[0].device.type == "cuda"
    return (CapturedSteps if capturable and alone else Steps)(weights, errors, power, count)


def local_windows(windows: Tensor) -> Tensor:
    """Return those of the windows that belong to this process."""
    return windows[windows % distributed.count() == distributed.rank()]
