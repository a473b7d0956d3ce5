"""As many windows run at once as fit into memory, and half as many when it runs out."""

import pytest
import torch

from recoveries import Listener
from slimstate.models.memory import DeviceMemory, Pieces
from slimstate.system import distributed
from slimstate.system.errors import PlanError

WINDOWS = torch.arange(10)


class SmallMemory(DeviceMemory):
    """A device with room for `room` tokens, one byte each."""

    def __init__(self, room: int) -> None:
        super().__init__(torch.device("cpu"))
        self.room, self.peak, self.is_measured = room, 0, True

    def free_bytes(self) -> int:
        return self.room

    def peak_bytes(self, work) -> int:
        self.peak = 0
        work()
        return self.peak

    def allocate(self, size: int) -> None:
        if size > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.peak = max(self.peak, size)


@pytest.mark.parametrize(("size", "lengths"), [(1, [1] * 10), (3, [3, 3, 3, 1]), (8, [5, 5]), (99, [10])])
def test_pieces_are_few_and_of_about_the_same_size(size, lengths):
    assert [len(piece) for piece in Pieces(SmallMemory(1), size).split(WINDOWS)] == lengths
    assert Pieces(SmallMemory(1), size).split(WINDOWS[:0]) == ()


def test_work_starts_again_with_half_of_the_windows_until_it_fits():
    memory, listener, sums = SmallMemory(3), Listener(), []
    pieces = Pieces(memory, 99, listener)

    def work():
        total = 0
        for piece in pieces.split(WINDOWS):
            sums.append(len(piece))
            memory.allocate(len(piece))
            total += int(piece.sum())
        return total

    assert pieces.run(work) == 45
    assert sums == [10, 5, 2, 2, 2, 2, 2]
    assert listener.lines == [f"out of memory: from here on at most {size} windows at once" for size in (5, 2)]


def test_a_piece_that_does_not_fit_is_repeated_in_halves_and_no_window_twice():
    memory, done = SmallMemory(3), []
    pieces = Pieces(memory, 4)

    def work(piece):
        memory.allocate(len(piece))
        done.extend(piece.tolist())

    pieces.each(WINDOWS, work)
    assert done == WINDOWS.tolist()


@pytest.mark.parametrize(("room", "reserved", "size"), [(1000, 0, 9), (1000, 500, 4), (100, 90, 1), (10**6, 0, 64)])
def test_the_size_is_what_fits_into_the_free_memory_beside_what_is_reserved(room, reserved, size):
    memory = SmallMemory(room)
    pieces = Pieces(memory, 64)
    pieces.measure(memory.allocate, 100, lambda: reserved)
    assert pieces.size == size


@pytest.mark.parametrize(("length", "way_out"), [(100, "`length` 25 in place of 100"), (10**6, "a smaller model")])
def test_a_device_too_small_for_one_window_says_what_fits(length, way_out):
    memory = SmallMemory(30 if length == 100 else 10)
    with pytest.raises(PlanError, match=f"out of memory with 0.0 GiB free on cpu: use {way_out}, or `device` cpu"):
        Pieces(memory, 64).measure(memory.allocate, length, lambda: 0)


def test_one_window_that_does_not_fit_and_processes_that_wait_end_the_run(monkeypatch):
    memory = SmallMemory(0)
    pieces = Pieces(memory, 2)
    for remedy in ("shorter windows", "smaller batches"):
        with pytest.raises(PlanError, match=f"use {remedy}"):
            pieces.run(lambda: [memory.allocate(len(piece)) for piece in pieces.split(WINDOWS)])
        monkeypatch.setattr(distributed, "count", lambda: 2)
