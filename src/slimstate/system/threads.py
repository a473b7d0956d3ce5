"""Threads of our own beside those that torch computes with.

Torch gives every operation as many threads as there are cores. Asked by several of ours at once, it makes as many for
each of them, which then keep each other waiting: so each of ours computes alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Lock, Thread
from typing import TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")

COUNTING = Lock()  # how many threads torch computes with is changed by one of us at a time


@contextmanager
def one_for_each_core() -> Iterator[ThreadPoolExecutor]:
    """Threads that share out work while all others wait for them."""
    with COUNTING, _restored() as cores:
        torch.set_num_threads(1)
        with ThreadPoolExecutor(cores, initializer=_compute_alone) as pool:
            yield pool


def in_the_background(number: int) -> ThreadPoolExecutor:
    """Threads that work while others go on, which keep all their cores."""
    pool, ready = ThreadPoolExecutor(number, initializer=_compute_alone), Barrier(number + 1)
    with COUNTING, _restored():
        try:
            for _ in range(number):
                pool.submit(ready.wait)
            ready.wait()
        except BaseException:  # those that wait would wait for ever, and the end of the process for them
            ready.abort()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return pool


def side_by_side(work: Callable[[S], T], parts: Sequence[S]) -> list[T]:
    """The results of work on parts, each by a thread of its own, while this one waits.

    For parts of many small operations, which torch cannot share out: its threads would wait for each other after each.
    """
    if len(parts) == 1 and torch.get_num_threads() == 1:
        return [work(parts[0])]
    inference, pool = torch.is_inference_mode_enabled(), _standing_pool(len(parts))

    def done(part: S) -> T:
        with torch.inference_mode(inference), torch.no_grad():  # what a thread begins with is another mode
            return work(part)

    return list(pool.map(done, parts))


@functools.cache
def _standing_pool(number: int) -> ThreadPoolExecutor:
    return in_the_background(number)


os.register_at_fork(after_in_child=_standing_pool.cache_clear)  # threads stay with the parent


def beside(work: Callable[[], T]) -> Callable[[], T]:
    """Begin some work. What is returned waits for its result, and raises what it raised; a process may end before."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=run, daemon=True).start()
    return result.result


@contextmanager
def _restored() -> Iterator[int]:
    """As many threads for torch afterwards as it has now, which is given."""
    cores = torch.get_num_threads()
    try:
        yield cores
    finally:
        torch.set_num_threads(cores)


def _compute_alone() -> None:
    """For this thread; it sets what all new ones begin with too, and each begins when it first asks."""
    torch.set_num_threads(1)
    torch.get_num_threads()
