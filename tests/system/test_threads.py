"""Our threads compute alone, and leave torch as many as it had."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slimstate.system import threads

MANY = 3


@pytest.fixture(autouse=True)
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(MANY)
    yield
    torch.set_num_threads(before)


def counted(pool: ThreadPoolExecutor) -> set[int]:
    return {future.result() for future in [pool.submit(torch.get_num_threads) for _ in range(8)]}


def in_a_new_thread() -> set[int]:
    with ThreadPoolExecutor(1) as pool:
        return counted(pool)


def test_threads_that_share_out_work_compute_alone_and_torch_has_all_again_afterwards():
    with threads.pool_of_all_cores() as pool:
        assert counted(pool) == {1}
    assert torch.get_num_threads() == MANY
    assert in_a_new_thread() == {MANY}
    with pytest.raises(ZeroDivisionError), threads.pool_of_all_cores() as pool:
        pool.submit(lambda: 1 / 0).result()
    assert torch.get_num_threads() == MANY


def test_threads_in_the_background_compute_alone_while_others_have_all():
    with threads.background_pool(2) as pool:
        assert counted(pool) == {1}
        assert torch.get_num_threads() == MANY
        assert in_a_new_thread() == {MANY}
        assert counted(pool) == {1}


def test_threads_that_cannot_all_start_leave_nobody_waiting(monkeypatch):
    start, started = threading.Thread.start, []

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start"):
        threads.background_pool(3)
    started[0].join(timeout=60)
    assert not started[0].is_alive()
    assert torch.get_num_threads() == MANY


def test_pools_of_two_threads_take_turns():
    def use_a_pool(_: int) -> set[int]:
        with threads.pool_of_all_cores() as pool:
            return counted(pool)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(use_a_pool, range(8))) == [{1}] * 8
    assert torch.get_num_threads() == MANY
    assert in_a_new_thread() == {MANY}


def test_work_beside_gives_its_result_or_what_it_raised_to_whoever_waits():
    begun, go = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert go.wait(timeout=60)
        return threading.current_thread().name

    waiting = threads.start(work)
    assert begun.wait(timeout=60)
    go.set()
    assert waiting() == waiting() != threading.current_thread().name
    with pytest.raises(ZeroDivisionError):
        threads.start(lambda: 1 / 0)()
