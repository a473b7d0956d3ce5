"""Our threads compute alone, and leave torch as many as it had."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slimstate import threads

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
    with threads.one_for_each_core() as pool:
        assert counted(pool) == {1}
    assert torch.get_num_threads() == MANY
    assert in_a_new_thread() == {MANY}


def test_torch_has_all_threads_again_after_a_failure():
    with pytest.raises(ZeroDivisionError), threads.one_for_each_core() as pool:
        pool.submit(lambda: 1 / 0).result()
    assert torch.get_num_threads() == MANY


def test_threads_in_the_background_compute_alone_while_others_have_all():
    with threads.in_the_background(2) as pool:
        assert counted(pool) == {1}
        assert torch.get_num_threads() == MANY
        assert in_a_new_thread() == {MANY}
        assert counted(pool) == {1}
