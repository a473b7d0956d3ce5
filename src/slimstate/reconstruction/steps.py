"""A step of training: its kernels launched one by one or, on a GPU, recorded once and played again.

A layer of a small model is hundreds of small kernels, and launching them takes longer than running them. A CUDA graph
launches all of a step at once: forward, backward and Adam. What cannot be recorded, because it asks the device for
something on the way, is launched one by one as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slimstate.system import distributed

Errors = Callable[[Tensor], Iterator[Tensor]]  # the squared errors over windows, a sum for every piece that fits memory
FIRST_BETA, LEAST_SECOND_BETA = 0.9, 0.9
REMEMBERED = 0.2  # of all steps, by Adam's second moment
BEFORE_RECORDING = 3  # steps, in which kernels are compiled and Adam makes its moments


class Steps:
    """`count` steps of Adam on the errors over windows, which are divided by `power` for each of them."""

    def __init__(
        self, weights: Sequence[torch.nn.Parameter], errors: Errors, power: float, count: int, **adam: Any
    ) -> None:
        self.weights, self.errors, self.power = weights, errors, power
        self.adam = torch.optim.Adam(weights, betas=(FIRST_BETA, second_beta(count)), **adam)

    def take(self, windows: Tensor, rate: float) -> Tensor:
        """One step on windows at a learning rate; returns the error before it, of those of this process."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        return self._step(held_here(windows), len(windows))

    def _step(self, windows: Tensor, count: int) -> Tensor:
        self.adam.zero_grad(set_to_none=True)
        losses = []
        for piece in self.errors(windows):
            part = piece / (self.power * count)
            part.backward()  # type: ignore[no-untyped-call]
            losses.append(part.detach())
        _sum_gradients(self.weights)
        self.adam.step()
        return torch.stack(losses).sum() if losses else torch.zeros(())


class RecordedSteps(Steps):
    """The same on one GPU, by a CUDA graph where the step can be recorded."""

    def __init__(self, weights: Sequence[torch.nn.Parameter], errors: Errors, power: float, count: int) -> None:
        device = weights[0].device
        self.rate = torch.zeros((), device=device)
        super().__init__(weights, errors, power, count, lr=self.rate, fused=True, capturable=True)
        self.windows: Tensor | None = None
        self.error = torch.zeros((), device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.taken, self.beside = 0, torch.cuda.Stream(device)

    def take(self, windows: Tensor, rate: float) -> Tensor:
        self.rate.fill_(rate)
        if self.windows is None:
            self.windows = windows.to(self.rate.device)
        self.windows.copy_(windows)
        self.taken += 1
        if self.taken == BEFORE_RECORDING + 1:
            self._record()
        if self.graph is None:
            return self._beside()
        self.graph.replay()
        return self.error

    def _beside(self) -> Tensor:
        """On a stream of its own, as is asked of everything before a recording."""
        assert self.windows is not None
        self.beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.beside):
            error = self._step(self.windows, len(self.windows))
        torch.cuda.current_stream().wait_stream(self.beside)
        return error

    def _record(self) -> None:
        assert self.windows is not None
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
    weights: Sequence[torch.nn.Parameter], errors: Errors, power: float, count: int, *, recordable: bool
) -> Steps:
    """What is fastest here; `recordable` says that `errors` takes windows on the device, and moves nothing there."""
    alone = distributed.count() == 1 and weights[0].device.type == "cuda"
    return (RecordedSteps if recordable and alone else Steps)(weights, errors, power, count)


def second_beta(count: int) -> float:
    """For the second moment to remember a share of the steps: a short training has no time for a long memory."""
    return max(LEAST_SECOND_BETA, 1 - 1 / (REMEMBERED * max(1, count)))


def held_here(windows: Tensor) -> Tensor:
    """Those of the windows that this process holds."""
    return windows[windows % distributed.count() == distributed.rank()]


def _sum_gradients(weights: Sequence[torch.nn.Parameter]) -> None:
    """Over all processes; one that had no window of the batch has none."""
    if distributed.count() == 1:
        return
    for weight in weights:
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        distributed.sum_over_all(weight.grad)
