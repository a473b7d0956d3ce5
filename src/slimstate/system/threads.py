"""Run our own threads beside those that torch computes with.

Torch uses a thread per core for every operation. If several of our threads call it at once, it starts as many for
each of them, and they slow each other down: so each of our threads computes with one.
"""

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
COUNT_LOCK = Lock()  # held while the number of torch's threads is changed


@contextmanager
def pool_of_all_cores() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool with a thread per core, for work that everything else waits for."""
    with COUNT_LOCK, _restore_thread_count() as cores:
        torch.set_num_threads(1)
        with ThreadPoolExecutor(cores, initializer=_compute_with_one) as pool:
            yield pool


def background_pool(size: int) -> ThreadPoolExecutor:
    """Return a pool for work beside the other threads, which keep all their cores."""
    pool, ready = ThreadPoolExecutor(size, initializer=_compute_with_one), Barrier(size + 1)
    with COUNT_LOCK, _restore_thread_count():
        try:
            for _ in range(size):
                pool.submit(ready.wait)
            ready.wait()
        except BaseException:  # threads that have started would wait forever, and keep the process from ending
            ready.abort()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return pool


def parallel_map(work: Callable[[S], T], parts: Sequence[S]) -> list[T]:
    """Return the results of `work` on parts of many small operations, which torch cannot divide between threads."""
    if len(parts) == 1 and torch.get_num_threads() == 1:
        return [work(parts[0])]
    inference = torch.is_inference_mode_enabled()

    def call(part: S) -> T:
        with torch.inference_mode(inference), torch.no_grad():  # threads start in the default mode
            return work(part)

    return list(_shared_pool(len(parts)).map(call, parts))


_shared_pool = functools.cache(background_pool)
os.register_at_fork(after_in_child=_shared_pool.cache_clear)  # a forked process has no threads of its parent


def start(work: Callable[[], T]) -> Callable[[], T]:
    """Start work in a daemon thread; return a function that waits for its result, or raises what it raised."""
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=call, daemon=True).start()
    return result.result


@contextmanager
def _restore_thread_count() -> Iterator[int]:
    """Yield the number of torch's threads, and set it again at the end."""
    count = torch.get_num_threads()
    try:
        yield count
    finally:
        torch.set_num_threads(count)


def _compute_with_one() -> None:
    """Let torch use one thread for the calls of this thread, which takes the number over when it first reads it."""
    torch.set_num_threads(1)
    torch.get_num_threads()
