"""Run as many windows at once as fit into the memory of a device, and fewer when it runs out."""

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from slimstate.models.devices import free_bytes
from slimstate.system import distributed
from slimstate.system.errors import PlanError
from slimstate.system.progress import SILENT, Reporter

T = TypeVar("T")
SHARE = 0.9  # of the free memory that pieces may take
MIN_LENGTH = 16  # tokens of a window


class DeviceMemory:
    """The memory of a device. What work takes is measured on GPUs only: on a CPU the system gives memory back late."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_measured = device, device.type == "cuda"

    def free_bytes(self) -> int:
        """Return the bytes that can still be allocated, with those that torch keeps for later."""
        free = free_bytes(self.device)
        if self.is_measured:
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Return the bytes that work takes at its peak, beyond those that are allocated before it."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def release(self) -> None:
        """Give back what is not used any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class Pieces:
    """Split windows into pieces of at most `size`, which is halved whenever memory runs out."""

    def __init__(self, memory: DeviceMemory, size: int, reporter: Reporter = SILENT) -> None:
        self.memory, self.size, self.reporter = memory, max(1, size), reporter
        self.largest = 1  # of the pieces that were run last

    def split(self, windows: Tensor) -> tuple[Tensor, ...]:
        """Return the windows in as few pieces as possible, of about the same size."""
        if not len(windows):
            return ()
        count = -(-len(windows) // self.size)
        self.largest = -(-len(windows) // count)
        return windows.split(self.largest)

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of work over pieces; when memory runs out, start it again with smaller ones."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                if distributed.count() > 1:  # the other processes wait for this one
                    raise self.shortage("smaller batches") from error
            self.memory.release()
            if self.largest == 1:
                raise self.shortage("shorter windows (`length`)")
            self.size = self.largest // 2
            self.reporter.say(f"out of memory: from here on at most {self.size} window{'s'[: self.size - 1]} at once")

    def each(self, windows: Tensor, work: Callable[[Tensor], object]) -> None:
        """Call work with every piece; one that does not fit into memory is repeated in halves."""

        def start(rest: Tensor) -> Tensor:
            piece = self.split(rest)[0]
            work(piece)
            return rest[len(piece) :]

        while len(windows):
            windows = self.run(partial(start, windows))

    def shortage(self, remedy: str) -> PlanError:
        free = f"{self.memory.free_bytes() / 2**30:.1f} GiB free on {self.memory.device}"
        return PlanError(f"out of memory with {free}: use {remedy}, or `device` cpu")

    def measure(self, work: Callable[[int], object], length: int, reserved: Callable[[], int]) -> None:
        """Set the size by what one window takes.

        `work` runs a window up to a length, and `reserved` are bytes that something else will take. Kernels are
        compiled in a first run. All processes take the smallest of their sizes.
        """
        shorter = length
        while shorter >= MIN_LENGTH and not self._fits(work, shorter):
            shorter //= 2
        if shorter < length:
            fits = shorter >= MIN_LENGTH
            raise self.shortage(f"`length` {shorter} in place of {length}" if fits else "a smaller model")
        taken = self.memory.peak_bytes(lambda: work(length))
        sizes = torch.zeros(distributed.count(), dtype=torch.int64, device=self.memory.device)
        sizes[distributed.rank()] = int(SHARE * (self.memory.free_bytes() - reserved())) // max(1, taken)
        self.size = max(1, min(self.size, int(distributed.sum_over_all(sizes).min())))

    def _fits(self, work: Callable[[int], object], length: int) -> bool:
        """Return whether a window of a length can run."""
        with suppress(torch.OutOfMemoryError):
            work(length)
            return True
        self.memory.release()
        return False
