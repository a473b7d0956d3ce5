"""A model whose states lose what an engine's cache would lose, by the same PyTorch recurrences on any device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from slimstate.core.layout import HookPoint, Mixer
from slimstate.core.state_dtype import StateRounding
from slimstate.kernels.patches import in_pytorch
from slimstate.models.hooks import Arguments, Operator, in_pieces, replaced
from slimstate.system.errors import ModelError

STEP_STATE = "state"  # the argument of an operator for one token that it updates in place


@contextmanager
def rounded_states(model: nn.Module, mixers: Sequence[Mixer], rounding: StateRounding) -> Iterator[None]:
    """While open, the states of every mixer are stored as `rounding` says; exact ones change nothing.

    Compiled kernels do not show the states between two tokens, so that recurrences run in PyTorch, on a GPU too.
    """

    def versions(hook: HookPoint, running: list[Mixer], module: Any) -> dict[str, Operator]:
        found = {name: _stored(getattr(module, name), hook, rounding, running) for name in hook.operators}
        if hook.step_operator is not None:
            found[hook.step_operator] = _stored_in_place(getattr(module, hook.step_operator), rounding)
        return found

    if rounding.is_exact:
        yield
        return
    with replaced(model, mixers, versions):
        yield


def _stored(operator: Operator, hook: HookPoint, rounding: StateRounding, running: list[Mixer]) -> Operator:
    names = tuple(inspect.signature(operator).parameters)

    def between(_: Arguments, __: int, state: Any) -> Any:
        return tuple(map(rounding, state)) if isinstance(state, tuple) else rounding(state)

    @functools.wraps(operator)
    def call(*args: Any, **options: Any) -> Any:
        if not running:
            return operator(*args, **options)
        if options.get("cu_seqlens") is not None:
            raise ModelError("states are rounded where sequences lie in a batch, not end to end: leave out padding")
        with in_pytorch():
            return in_pieces(operator, hook, Arguments(names, args, options), rounding.every, between)

    return call


def _stored_in_place(operator: Operator, rounding: StateRounding) -> Operator:
    names = tuple(inspect.signature(operator).parameters)

    @functools.wraps(operator)
    def call(*args: Any, **options: Any) -> Any:
        result = operator(*args, **options)
        state: Tensor = Arguments(names, args, options)[STEP_STATE]
        state.copy_(rounding(state))
        return result

    return call
