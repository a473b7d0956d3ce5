"""Functions that run in place of a library's own, where those cannot: on a CPU, or with numbers they do not take.

Every module of this package lists what it has for fla as PATCHES = (...), and for transformers, by the name that a
function has in all of its modules, as IN_TRANSFORMERS = {...}. Both are found here by themselves: a new recurrence is a
module and nothing else. Each patch stands aside for CUDA tensors that fla's own kernels take, so a
model on a GPU is not touched, unless `in_pytorch` asks for it. The model classes stay those of the libraries.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimstate.core.layout import HookPoint
from slimstate.system.plugins import listed_values, modules_of

_IN_PYTORCH = ContextVar("in PyTorch, wherever the tensors are", default=False)


@contextmanager
def in_pytorch() -> Iterator[None]:
    """While open, patches run for all arguments: compiled kernels do not show a state between two tokens."""
    before = _IN_PYTORCH.set(True)
    try:
        yield
    finally:
        _IN_PYTORCH.reset(before)


def tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def on_cpu(*args: Any, **kwargs: Any) -> bool:
    first = next(iter(tensors((*args, *kwargs.values()))))
    return first.device.type == "cpu"


def always(*_: Any, **__: Any) -> bool:
    return True


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
class Patch:
    """A function that runs in place of another one, with its arguments, when these make it so."""

    # where the other one is looked up when it is called: "fla.layers.kda.chunk_kda"
    place: str
    # what runs there instead
    version: Callable[..., Any]
    # for which arguments it does; the other one runs for all else
    when: Callable[..., bool] = on_cpu

    @property
    def owner(self) -> Any:
        """The module, or the class, that has the other function."""
        return pkgutil.resolve_name(self.place.rpartition(".")[0])

    @property
    def name(self) -> str:
        """The name of the other function there."""
        return self.place.rpartition(".")[2]

    def runs(self, *args: Any, **kwargs: Any) -> bool:
        """Whether this version does, with these arguments."""
        return _IN_PYTORCH.get() or self.when(*args, **kwargs)

    def install(self) -> None:
        original = getattr(self.owner, self.name, None)  # None where what it comes from is not installed

        @functools.wraps(self.version)
        def routed(*args: Any, **kwargs: Any) -> Any:
            chosen = self.version if original is None or self.runs(*args, **kwargs) else original
            return chosen(*args, **kwargs)

        setattr(self.owner, self.name, routed)


@dataclass(frozen=True)
class Backend(Patch):
    """One that fla itself chooses, from its registry of backends: of a whole differentiable function."""

    # the name under which fla registers its backends, where that is not the function itself: "gated_delta_rule"
    operation: str | None = None

    def install(self) -> None:
        from fla.backends import BaseBackend, register

        def verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return self.runs(*args, **kwargs), "fla's own kernel runs"

        members = {
            "backend_type": "slimstate_torch",
            "priority": -1,
            self.name: staticmethod(self.version),
            f"{self.name}_verifier": staticmethod(verify),
        }
        register(self.operation or getattr(self.owner, self.name))(type("TorchBackend", (BaseBackend,), members))


def in_place_of(
    module: str, names: Iterable[str], version: Callable[..., Any], when: Callable[..., bool] = on_cpu
) -> tuple[Patch, ...]:
    """One function for several of a module."""
    return tuple(Patch(f"{module}.{name}", version, when) for name in names)


PACKAGE = importlib.import_module(__package__)


def patches() -> tuple[Patch, ...]:
    """Return everything that this package has for fla."""
    return tuple(listed_values(PACKAGE, "PATCHES", Patch))


def in_transformers() -> dict[str, Callable[..., Any]]:
    """All that this package has for transformers, by the names of the functions there."""
    return {
        name: version
        for module in modules_of(PACKAGE)
        for name, version in getattr(module, "IN_TRANSFORMERS", {}).items()
    }


@functools.cache
def install() -> None:
    """Make fla's models run wherever PyTorch runs. Once a process; a second call does nothing."""
    for patch in patches():
        patch.install()


@functools.cache
def use_reference(hook: HookPoint) -> None:
    """Make the functions of a transformers module run where compiled ones cannot: our form, or their own in PyTorch.

    Transformers chooses compiled kernels when it is imported, by what is installed and not by where the tensors are.
    Once a process.
    """
    module, ours = importlib.import_module(hook.module), in_transformers()
    step = () if hook.step_operator is None else (hook.step_operator,)
    for name in (*hook.operators, *step, *hook.gpu_kernels):
        chosen = getattr(module, name)
        version = ours.get(name, inspect.unwrap(chosen))
        if version is not chosen:
            when = needs_torch_gated_rule if "gated_delta_rule" in name else on_cpu
            Patch(f"{hook.module}.{name}", version, when).install()
    for name in hook.fused_layers:
        Patch(f"{hook.module}.{name}", inspect.unwrap(getattr(module, name)), always).install()
