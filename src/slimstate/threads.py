"""Threads of our own beside those that torch computes with.

Torch gives every operation as many threads as there are cores. Asked by several of ours at once, it makes as many for
each of them, which then keep each other waiting: so each of ours computes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import torch


@contextmanager
def one_for_each_core() -> Iterator[ThreadPoolExecutor]:
    """Threads that share out work while all others wait for them."""
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(cores, initializer=_compute_alone) as pool:
            yield pool
    finally:
        torch.set_num_threads(cores)


def in_the_background(number: int) -> ThreadPoolExecutor:
    """Threads that work while others go on, which keep all their cores."""
    cores = torch.get_num_threads()
    pool = ThreadPoolExecutor(number, initializer=_compute_alone)
    ready = Barrier(number + 1)
    for _ in range(number):
        pool.submit(ready.wait)
    ready.wait()
    torch.set_num_threads(cores)
    return pool


def _compute_alone() -> None:
    """For this thread; it sets what all new ones begin with too, and each begins when it first asks."""
    torch.set_num_threads(1)
    torch.get_num_threads()
