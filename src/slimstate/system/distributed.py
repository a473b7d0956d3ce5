"""Several processes that work as one: who this one is, sums over all of them, and what only the main one does.

`torchrun` and `accelerate launch` start them and say so in the environment; without them there is one.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from slimstate.system.errors import SlimstateError

if TYPE_CHECKING:  # torch takes seconds to load, and who this process is needs none of it
    import torch
    from torch import Tensor

T = TypeVar("T")
PATIENCE = timedelta(hours=6)  # one process may tokenise a large text or fill a cache while the others wait


def count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def count_here() -> int:
    """Those of them on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def launched() -> bool:
    """Whether a launcher started this process, be it the only one."""
    return "RANK" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    return rank() == 0


def local_device(kind: str) -> torch.device:
    """The GPU that belongs to this process, or the CPU."""
    import torch

    if kind == "cuda" and count() > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(kind)


def join(device: torch.device) -> None:
    """Meet the other processes, where there are any; to be called before anything is shared."""
    if count() == 1:
        return
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # with gloo beside nccl, waiting keeps no GPU busy
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
        atexit.register(_leave)


def _leave() -> None:
    """All leave together; one that failed alone goes at once, and whatever started them ends the others."""
    import torch.distributed as dist

    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def share(items: Sequence[T]) -> Sequence[T]:
    """Those of the items that are for this process."""
    return items[rank() :: count()]


def sum_over_all(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if count() > 1:
        import torch.distributed as dist

        dist.all_reduce(tensor)
    return tensor


def wait_for_all() -> None:
    if count() > 1:
        import torch.distributed as dist

        dist.barrier()


def from_main(work: Callable[[], T]) -> T:
    """What `work` gives on the main process, which alone does it; the others wait for it and fail as it fails.

    It begins when all have come here, so that they have all seen the files as they were before.
    """
    if count() == 1:
        return work()
    import torch
    import torch.distributed as dist

    join(torch.device("cpu"))
    wait_for_all()
    outcome: list[T | SlimstateError | None] = [_attempt(work) if is_main() else None]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], SlimstateError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]


def _attempt(work: Callable[[], T]) -> T | SlimstateError:
    try:
        return work()
    except SlimstateError as error:
        return error
