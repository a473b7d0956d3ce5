"""Work with several processes, which `torchrun` or `accelerate launch` start; without them there is one."""

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from slimstate.system.errors import SlimstateError

if TYPE_CHECKING:  # importing torch takes seconds, and the rank is known without it
    import torch
    from torch import Tensor

T = TypeVar("T")
TIMEOUT = timedelta(hours=6)  # one process may tokenise a large text or fill a cache while the others wait


def count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def count_here() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_launched() -> bool:
    """Return whether a launcher started this process, even if it is the only one."""
    return "RANK" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    return rank() == 0


def local_rank() -> int:
    """Return the number of this process on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def join(device: "torch.device") -> None:
    """Connect to the other processes, if there are any; call this before anything is shared."""
    if count() == 1:
        return
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # gloo beside nccl, so that no GPU is busy while a process waits
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
        atexit.register(_leave)


def _leave() -> None:
    """Disconnect together; a process that failed alone ends at once, and the launcher ends the others."""
    import torch.distributed as dist

    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def share(items: Sequence[T]) -> Sequence[T]:
    """Return the items that this process works on."""
    return items[rank() :: count()]


def sum_over_all(tensor: "Tensor") -> "Tensor":
    """Sum a tensor over all processes, in place, and return it."""
    if count() > 1:
        import torch.distributed as dist

        dist.all_reduce(tensor)
    return tensor


def wait_for_all() -> None:
    if count() > 1:
        import torch.distributed as dist

        dist.barrier()


def from_main(work: Callable[[], T]) -> T:
    """Do some work on the main process only; return its result, or raise its error, on all of them.

    The work starts when all processes are here, so that all of them have seen the files as they were before.
    """
    if count() == 1:
        return work()
    import torch
    import torch.distributed as dist

    join(torch.device("cpu"))
    wait_for_all()
    outcome: list[T | SlimstateError | None] = [None]
    if is_main():
        try:
            outcome = [work()]
        except SlimstateError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], SlimstateError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]
