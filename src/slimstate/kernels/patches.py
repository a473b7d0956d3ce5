"""Functions that run in place of a library's own, where those cannot: on a CPU, or with numbers they do not take."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def on_cpu(*args: Any, **kwargs: Any) -> bool:
    first = next(iter(tensors((*args, *kwargs.values()))))
    return first.device.type == "cpu"


def too_precise_for_triton(*args: Any, **kwargs: Any) -> bool:
    """fla's chunked delta rule takes half precision only."""
    return on_cpu(*args, **kwargs) or next(iter(tensors((*args, *kwargs.values())))).dtype in (
        torch.float32,
        torch.float64,
    )


@functools.cache
def gated_backward_refused() -> bool:
    """fla refuses the gated backward on Hopper with Triton 3.4 up to 3.7.0, whose gradients are wrong there."""
    if importlib.util.find_spec("fla") is None:
        return False
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    return bool(IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1)


def needs_torch_gated_rule(*args: Any, **kwargs: Any) -> bool:
    if on_cpu(*args, **kwargs):
        return True
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors((*args, *kwargs.values())))
    return differentiated and gated_backward_refused()


@dataclass(frozen=True)
class Substitute:
    """`version` is called in `place` of another function with its arguments, `when` these make it so.

    `place` is where the other one is looked up when it is called: a module and a name in it, with a dot between.
    """

    place: str
    version: Callable[..., Any]
    when: Callable[..., bool] = on_cpu


def in_place_of(
    module: str, names: Iterable[str], version: Callable[..., Any], when: Callable[..., bool] = on_cpu
) -> tuple[Substitute, ...]:
    """One function for several of a module."""
    return tuple(Substitute(f"{module}.{name}", version, when) for name in names)
