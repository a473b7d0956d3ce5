"""Replace functions of fla and transformers where they cannot run: on a CPU, or in a dtype they do not support.

Every module of this package lists its functions for fla as PATCHES = (...), and those for transformers, by the name
that a function has in all of its modules, as IN_TRANSFORMERS = (...). They are collected here, so that a new recurrence
is one module. A patch leaves CUDA tensors that fla's own kernels support to those, unless `in_pytorch` is open. The
model classes stay those of the libraries.
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slimstate.core.layout import HookPoint
from slimstate.system.errors import ModelError
from slimstate.system.plugins import listed_values

IN_PYTORCH = ContextVar("in PyTorch on any device", default=False)  # whether `in_pytorch` is open
IN_RECOMPUTED = ContextVar("in what a backward pass computes again", default=False)


@contextmanager
def in_pytorch() -> Iterator[None]:
    """Run patches for all arguments while this is open: compiled kernels do not expose the state between tokens."""
    before = IN_PYTORCH.set(True)
    try:
        yield
    finally:
        IN_PYTORCH.reset(before)


def tensors_in(*args: Any, **kwargs: Any) -> Iterator[Tensor]:
    return (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def on_cpu(*args: Any, **kwargs: Any) -> bool:
    return next(tensors_in(*args, **kwargs)).device.type == "cpu"


def has_float64(*args: Any, **kwargs: Any) -> bool:
    """Return whether the device of the arguments has float64, in which our recurrences sum decays: Metal has not."""
    return next(tensors_in(*args, **kwargs)).device.type != "mps"


def too_precise_for_triton(*args: Any, **kwargs: Any) -> bool:
    """Return whether fla's chunked delta rule cannot run: on a CPU, or in more than half precision."""
    first = next(tensors_in(*args, **kwargs))
    return first.device.type == "cpu" or first.dtype in (torch.float32, torch.float64)


@functools.cache
def has_fla() -> bool:
    """Return whether flash-linear-attention is there and can be imported."""
    try:
        importlib.import_module("fla.utils")
    except Exception:  # a Triton without a driver, or of another version, fails in many ways
        return False
    return True


@functools.cache
def gated_backward_refused() -> bool:
    """Return whether fla refuses the gated backward: on Hopper with Triton 3.4 to 3.7.0, whose gradients are wrong."""
    if not has_fla():
        return False
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    return bool(IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1)


def needs_gradient(*args: Any, **kwargs: Any) -> bool:
    """Return whether a backward pass through these arguments may follow."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(*args, **kwargs))


def saves_for_backward(*args: Any, **kwargs: Any) -> bool:
    """Return whether what is computed from these arguments would be in memory until a backward pass."""
    return needs_gradient(*args, **kwargs) and not IN_RECOMPUTED.get()


def trains_on_gpu(layer: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Return whether a call of a layer is a step of training on a GPU, without a cache, which it would update twice."""
    from transformers import Cache

    has_cache = any(isinstance(value, Cache) for value in (*args, *kwargs.values()))
    return layer.training and torch.is_grad_enabled() and not has_cache and not on_cpu(*args, **kwargs)


def recomputed(forward: Callable[..., Any], *, is_random: bool = False) -> Callable[..., Any]:
    """Return a function that saves its inputs only, because the backward pass computes it again.

    Where it may draw random numbers, as dropout of adapters does, they are the same again.
    """

    def without_saving_parts(*args: Any, **kwargs: Any) -> Any:
        before = IN_RECOMPUTED.set(True)
        try:
            return forward(*args, **kwargs)
        finally:
            IN_RECOMPUTED.reset(before)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(without_saving_parts, *args, use_reentrant=False, preserve_rng_state=is_random, **kwargs)

    return run


def needs_torch_gated_rule(*args: Any, **kwargs: Any) -> bool:
    """Return whether fla's gated delta rule cannot run: on a CPU, or in float32 for a backward pass that it refuses.

    In half precision that pass runs with a step of our own (`gated_gradient`).
    """
    if on_cpu(*args, **kwargs) or not has_fla():
        return has_float64(*args, **kwargs)
    is_precise = too_precise_for_triton(*args, **kwargs)
    return is_precise and gated_backward_refused() and needs_gradient(*args, **kwargs)


@dataclass(frozen=True)
class Patch:
    """A function that replaces another one for some arguments."""

    place: str  # where calls look up the original: "fla.layers.kda.chunk_kda"; in transformers its name alone
    version: Callable[..., Any]  # the replacement
    when: Callable[..., bool] = on_cpu  # for which arguments it runs; the original runs for all others

    @property
    def owner(self) -> Any:
        """The module or class that has the original."""
        return pkgutil.resolve_name(self.place.rpartition(".")[0])

    @property
    def name(self) -> str:
        """The name of the original there."""
        return self.place.rpartition(".")[2]

    def runs(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether the replacement runs for these arguments."""
        return IN_PYTORCH.get() or self.when(*args, **kwargs)

    def install(self) -> None:
        original = getattr(self.owner, self.name, None)  # None if its package is not installed

        @functools.wraps(self.version)
        def route(*args: Any, **kwargs: Any) -> Any:
            function = self.version if original is None or self.runs(*args, **kwargs) else original
            return function(*args, **kwargs)

        setattr(self.owner, self.name, route)


@dataclass(frozen=True)
class Backend(Patch):
    """A patch of a differentiable function that fla itself chooses, from its registry of backends."""

    # the name under which fla registers backends, if that is not the function itself: "gated_delta_rule"
    operation: str | None = None

    def install(self) -> None:
        from fla.backends import BaseBackend, register

        def accept(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return self.runs(*args, **kwargs), "fla's own kernel runs"

        members = {
            "backend_type": "slimstate_torch",
            "priority": -1,
            self.name: staticmethod(self.version),
            f"{self.name}_verifier": staticmethod(accept),
        }
        register(self.operation or getattr(self.owner, self.name))(type("TorchBackend", (BaseBackend,), members))


def in_place_of(
    module: str, names: Iterable[str], version: Callable[..., Any], when: Callable[..., bool] = on_cpu
) -> tuple[Patch, ...]:
    """Return patches that replace several functions of a module by one."""
    return tuple(Patch(f"{module}.{name}", version, when) for name in names)


PACKAGE = importlib.import_module(__package__)


def patches() -> tuple[Patch, ...]:
    """Return everything that this package has for fla."""
    return tuple(listed_values(PACKAGE, "PATCHES", Patch))


def in_transformers() -> dict[str, Patch]:
    """Return everything that this package has for transformers, by the names of the functions there."""
    return {patch.place: patch for patch in listed_values(PACKAGE, "IN_TRANSFORMERS", Patch)}


@functools.cache
def install(kind: type[Patch] = Patch) -> None:
    """Make fla's models run wherever PyTorch runs, or register only the `Backend`s, which transformers calls, too.

    A second call does nothing.
    """
    for patch in patches():
        if isinstance(patch, kind):
            patch.install()


@functools.cache
def use_reference(hook: HookPoint) -> None:
    """Replace compiled kernels in a transformers module by our functions, or by their own in PyTorch.

    Transformers chooses compiled kernels when it is imported, by what is installed and not by the device of tensors.
    A backward pass recomputes gated norms, and in training on a GPU the layers whose hook says so. A second call does
    nothing.
    """
    module, ours = importlib.import_module(hook.module), in_transformers()
    for name in (*hook.every_operator, *hook.gpu_kernels):
        current = getattr(module, name)
        when = needs_torch_gated_rule if "gated_delta_rule" in name else on_cpu
        plain = inspect.unwrap(current)
        plain = _without_packing(plain) if name in hook.gpu_kernels else plain
        patch = ours.get(name, Patch(name, plain, when))
        if patch.version is not current:
            replace(patch, place=f"{hook.module}.{name}").install()
    for name in [name for name in vars(module) if name.endswith("RMSNormGated")]:  # saves five tensors in float32
        norm = recomputed(getattr(module, name).forward)
        Patch(f"{hook.module}.{name}.forward", norm, saves_for_backward).install()
    for layer in _layers_that_call(hook) if hook.recomputed else ():
        again = recomputed(layer.forward, is_random=True)
        Patch(f"{hook.module}.{layer.__name__}.forward", again, trains_on_gpu).install()
    for name in hook.fused_layers:
        Patch(f"{hook.module}.{name}", inspect.unwrap(getattr(module, name)), lambda *_, **__: True).install()


def _without_packing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a convolution that refuses packed sequences, because in PyTorch it would mix them."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("seq_idx") is not None:
            raise ModelError("packed sequences (`seq_idx`) need causal-conv1d on a GPU: pad the sequences instead")
        return function(*args, **kwargs)

    return run


def _layers_that_call(hook: HookPoint) -> list[type[nn.Module]]:
    """Return the classes of a transformers module whose forward pass calls the operator."""
    values = vars(importlib.import_module(hook.module)).values()
    layers = [value for value in values if isinstance(value, type) and issubclass(value, nn.Module)]
    return [layer for layer in layers if hook.operators[0] in inspect.unwrap(layer.forward).__code__.co_names]
