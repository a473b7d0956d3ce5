"""Run a model whose states are rounded as in an engine's cache, by PyTorch recurrences on any device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from slimstate.core.layout import HookPoint, Mixer
from slimstate.core.state_dtype import StateRounding
from slimstate.kernels.patches import in_pytorch
from slimstate.models.hooks import Arguments, Operator, Wrapper, in_pieces, replaced
from slimstate.system.errors import ModelError

STEP_STATE = "state"  # the argument that an operator for one token updates in place


def rounded_states(model: nn.Module, mixers: Sequence[Mixer], rounding: StateRounding) -> AbstractContextManager[None]:
    """Round the states of every mixer while this is open; exact states change nothing.

    Compiled kernels do not expose the states between tokens, so the recurrences run in PyTorch, also on a GPU.
    """

    def between(_: Arguments, __: int, state: Any) -> Any:
        return tuple(map(rounding, state)) if isinstance(state, tuple) else rounding(state)

    def round_pieces(operator: Operator, mixer: Mixer, arguments: Arguments) -> Any:
        if arguments.get("cu_seqlens") is not None:
            raise ModelError("rounding of states needs sequences in a batch, not end to end: leave out padding")
        with in_pytorch():
            return in_pieces(operator, mixer.hook, arguments, rounding.every, between)

    def round_in_place(operator: Operator, mixer: Mixer, arguments: Arguments) -> Any:
        result = arguments.pass_to(operator)
        if (state := arguments.get(STEP_STATE)) is None:  # they are returned
            return (result[0], *map(rounding, result[1:]))
        state.copy_(rounding(state))
        return result

    def wrappers(hook: HookPoint) -> dict[str, Wrapper]:
        step = {} if hook.step_operator is None else {hook.step_operator: round_in_place}
        return {**dict.fromkeys(hook.operators, round_pieces), **step}

    return nullcontext() if rounding.is_exact else replaced(model, mixers, wrappers)
