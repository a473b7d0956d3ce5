"""Run a model whose states are rounded as in an engine's cache, by PyTorch recurrences on any device."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from slimstate.core.layout import HookPoint, Mixer
from slimstate.core.state_dtype import StateRounding
from slimstate.kernels.patches import in_pytorch
from slimstate.models.hooks import Arguments, Operator, in_pieces, parameter_names, replaced
from slimstate.system.errors import ModelError

STEP_STATE = "state"  # the argument that an operator for one token updates in place


@contextmanager
def rounded_states(model: nn.Module, mixers: Sequence[Mixer], rounding: StateRounding) -> Iterator[None]:
    """Round the states of every mixer while this is open; exact states change nothing.

    Compiled kernels do not expose the states between tokens, so the recurrences run in PyTorch, also on a GPU.
    """

    def versions(hook: HookPoint, running: list[Mixer], module: Any) -> dict[str, Operator]:
        operators = {name: _round(getattr(module, name), hook, rounding, running) for name in hook.operators}
        if hook.step_operator is not None:
            operators[hook.step_operator] = _round_in_place(getattr(module, hook.step_operator), rounding)
        return operators

    if rounding.is_exact:
        yield
        return
    with replaced(model, mixers, versions):
        yield


def _round(operator: Operator, hook: HookPoint, rounding: StateRounding, running: list[Mixer]) -> Operator:
    names = parameter_names(operator)

    def between(_: Arguments, __: int, state: Any) -> Any:
        return tuple(map(rounding, state)) if isinstance(state, tuple) else rounding(state)

    @functools.wraps(operator)
    def call(*args: Any, **options: Any) -> Any:
        if not running:
            return operator(*args, **options)
        if options.get("cu_seqlens") is not None:
            raise ModelError("rounding of states needs sequences in a batch, not end to end: leave out padding")
        with in_pytorch():
            return in_pieces(operator, hook, Arguments(names, args, options), rounding.every, between)

    return call


def _round_in_place(operator: Operator, rounding: StateRounding) -> Operator:
    names = parameter_names(operator)

    @functools.wraps(operator)
    def call(*args: Any, **options: Any) -> Any:
        result = operator(*args, **options)
        state: Tensor = Arguments(names, args, options)[STEP_STATE]
        state.copy_(rounding(state))
        return result

    return call
