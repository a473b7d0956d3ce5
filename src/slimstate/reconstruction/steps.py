"""Training steps: kernels launched one by one or, on a GPU, captured once in a CUDA graph and replayed.

A layer of a small model is hundreds of small kernels, and launching them takes longer than running them. A CUDA graph
launches a whole step at once: forward, backward and Adam. A step that reads from the device cannot be captured and is
launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slimstate.system import distributed

Errors = Callable[[Tensor], Iterator[Tensor]]  # yields the sum of squared errors of each piece of the windows
FIRST_BETA, MIN_SECOND_BETA = 0.9, 0.9
MEMORY = 0.2  # of all steps, by Adam's second moment
STEPS_BEFORE_CAPTURE = 3  # in which kernels are compiled and Adam creates its moments


class Steps:
    """Take `count` steps of Adam on the errors over windows, relative to `power` per window."""

    def __init__(
        self, weights: Sequence[torch.nn.Parameter], errors: Errors, power: float, count: int, **adam: Any
    ) -> None:
        self.weights, self.errors, self.power = weights, errors, power
        self.adam = torch.optim.Adam(weights, betas=(FIRST_BETA, second_beta(count)), **adam)

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
        _sum_gradients(self.weights)
        self.adam.step()
        return torch.stack(losses).sum() if losses else torch.zeros(())


class CapturedSteps(Steps):
    """Take steps on one GPU by a CUDA graph, where the step can be captured."""

    def __init__(self, weights: Sequence[torch.nn.Parameter], errors: Errors, power: float, count: int) -> None:
        device = weights[0].device
        self.rate = torch.zeros((), device=device)
        super().__init__(weights, errors, power, count, lr=self.rate, fused=True, capturable=True)
        self.windows: Tensor | None = None
        self.error = torch.zeros((), device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.count, self.stream = 0, torch.cuda.Stream(device)

    def take(self, windows: Tensor, rate: float) -> Tensor:
        self.rate.fill_(rate)
        if self.windows is None:
            self.windows = windows.to(self.rate.device)
        self.windows.copy_(windows)
        self.count += 1
        if self.count == STEPS_BEFORE_CAPTURE + 1:
            self._capture()
        if self.graph is None:
            return self._step_on_stream()
        self.graph.replay()
        return self.error

    def _step_on_stream(self) -> Tensor:
        """Take a step on a stream of its own, as PyTorch requires before a capture."""
        assert self.windows is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            error = self._step(self.windows, len(self.windows))
        torch.cuda.current_stream().wait_stream(self.stream)
        return error

    def _capture(self) -> None:
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
    """Return the fastest steps for this device; `recordable` says that a step can be captured."""
    alone = distributed.count() == 1 and weights[0].device.type == "cuda"
    return (CapturedSteps if recordable and alone else Steps)(weights, errors, power, count)


def second_beta(count: int) -> float:
    """Return the beta with which the second moment averages over a share of the steps."""
    return max(MIN_SECOND_BETA, 1 - 1 / (MEMORY * max(1, count)))


def local_windows(windows: Tensor) -> Tensor:
    """Return those of the windows that belong to this process."""
    return windows[windows % distributed.count() == distributed.rank()]


def _sum_gradients(weights: Sequence[torch.nn.Parameter]) -> None:
    """Sum gradients over all processes; one without a window of the batch has none."""
    if distributed.count() == 1:
        return
    for weight in weights:
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        distributed.sum_over_all(weight.grad)
