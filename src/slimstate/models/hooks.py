"""See, or change, the queries and keys of a running model just before they enter the state; see the state itself."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstate.core.layout import HookPoint, Mixer
from slimstate.core.selection import Basis, Choice
from slimstate.core.surgery import kept_channels, rotated

Role = Literal["query", "key", "key-like"]
See = Callable[[Mixer, Role, Tensor], Tensor]
Operator = Callable[..., Any]


class Arguments:
    """The arguments of a call by name; those given by position stay there, because kernels name them differently."""

    def __init__(self, names: tuple[str, ...], args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self.names, self.args, self.options = names, list(args), dict(options)

    def __getitem__(self, name: str) -> Any:
        place = self.names.index(name) if name in self.names else len(self.args)
        return self.args[place] if place < len(self.args) else self.options[name]

    def __setitem__(self, name: str, value: Any) -> None:
        place = self.names.index(name) if name in self.names else len(self.args)
        if place < len(self.args):
            self.args[place] = value
        else:
            self.options[name] = value

    def get(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            return None

    def copy(self) -> Arguments:
        return Arguments(self.names, self.args, self.options)


def _parameters(operator: Operator) -> tuple[str, ...]:
    return tuple(inspect.signature(operator).parameters)


def roles(hook: HookPoint) -> tuple[tuple[Role, str], ...]:
    """The names of the arguments that take the queries and the keys."""
    return ("query", hook.query), ("key", hook.key)


def _seen_by(see: See, mixer: Mixer, role: Role, x: Tensor, timeless: bool) -> Tensor:
    """What `see` makes of x, which may hold each head once for every value head and may lack the time axis."""
    x = x.unsqueeze(1) if timeless else x
    copies = x.shape[2] // mixer.axis.heads
    # copies that differ, as queries of one key head may, are seen one after the other
    seen = torch.stack([see(mixer, role, x[:, :, copy::copies]) for copy in range(_distinct(mixer, role, copies))], 3)
    seen = seen if seen.shape[3] == copies else seen.expand(-1, -1, -1, copies, -1)
    seen = seen.flatten(2, 3)
    return seen.squeeze(1) if timeless else seen


def _distinct(mixer: Mixer, role: Role, copies: int) -> int:
    slot = mixer.query if role == "query" else mixer.key
    return slot.copies if slot.copies == copies else 1


def _times(result: Any, factor: float) -> Any:
    """The output of an operator, alone or with a state, times a factor."""
    return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor


@contextmanager
def hooked(model: nn.Module, mixers: Sequence[Mixer], see: See, scale: float | None = None) -> Iterator[None]:
    """While open, the queries and keys [B, T, H, D] of every mixer are what `see` returns, scaled by `scale`."""

    def versions(hook: HookPoint, running: list[Mixer], module: Any) -> dict[str, Operator]:
        def watched(operator: Operator, *, timeless: bool = False) -> Operator:
            names = _parameters(operator)

            @functools.wraps(operator)
            def call(*args: Any, **options: Any) -> Any:
                given = Arguments(names, args, options)
                for mixer in running:
                    if hook.normaliser is None:
                        for role, name in (*roles(hook), *(("key-like", name) for name in hook.key_like)):
                            given[name] = _seen_by(see, mixer, role, given[name], timeless)
                result = operator(*given.args, **given.options)
                if scale is None or not hook.scales_queries or not running:
                    return result
                return _times(result, scale * given[hook.query].shape[-1] ** 0.5)

            return call

        def watched_normaliser(normalise: Operator) -> Operator:
            roles: Iterator[Role] = itertools.cycle(("query", "key"))
            return lambda x: normalise(see(running[0], next(roles), x) if running else x)

        replaced = {name: watched(getattr(module, name)) for name in hook.operators}
        if hook.step_operator is not None:
            replaced[hook.step_operator] = watched(getattr(module, hook.step_operator), timeless=True)
        if hook.normaliser is not None:
            replaced[hook.normaliser] = watched_normaliser(getattr(module, hook.normaliser))
        return replaced

    with replaced(model, mixers, versions):
        yield


@contextmanager
def masked(
    model: nn.Module, mixers: Sequence[Mixer], selections: Mapping[int, Choice], *, rescaled: bool = False
) -> Iterator[None]:
    """The cut model without cutting it: dropped channels are zero before the norm.

    Where a basis is kept, the weights are rotated by it while this is open: behind an activation, rotating the queries
    and keys themselves would be another model than the cut one. `rescaled` also sets the query scale to that of the key
    dim, as a cut does whose norm epsilon is kept.
    """
    masks = {
        mixer.layer: torch.zeros(mixer.axis.heads, mixer.axis.width).scatter_(
            1, kept_channels(selections[mixer.layer]), 1.0
        )
        for mixer in mixers
    }
    key_dim = selections[mixers[0].layer].key_dim

    def mask(mixer: Mixer, role: Role, x: Tensor) -> Tensor:
        return x * masks[mixer.layer].to(x)

    scale = key_dim**-0.5 if rescaled else None
    with _rotated_weights(model, mixers, selections), hooked(model, mixers, mask, scale):
        yield


@contextmanager
def _rotated_weights(model: nn.Module, mixers: Sequence[Mixer], selections: Mapping[int, Choice]) -> Iterator[None]:
    """While open, the parameters of every mixer that keeps a basis are rotated by it, at the size they have."""
    before: dict[str, Tensor] = {}
    try:
        with torch.inference_mode(False), torch.no_grad():
            for mixer in mixers:
                choice = selections[mixer.layer]
                for slot in mixer.axis.slots if isinstance(choice, Basis) else ():
                    assert isinstance(choice, Basis)
                    parameter = model.get_parameter(mixer.running_name_of(slot))
                    before.setdefault(mixer.running_name_of(slot), parameter.detach().clone())
                    parameter.copy_(rotated(mixer.axis, slot, choice, parameter.detach()))
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for name, values in before.items():
                model.get_parameter(name).copy_(values)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The state [B, G, K, V] of a mixer after some tokens, and the queries and keys [B, t, H, K] since the last one.

    G value heads, a multiple of the H query/key heads. `time` counts the tokens since the model was called.
    """

    mixer: Mixer
    time: int
    state: Tensor
    queries: Tensor
    keys: Tensor


@contextmanager
def observed(
    model: nn.Module, mixers: Sequence[Mixer], see: Callable[[Reading], None], every: int | None = None
) -> Iterator[None]:
    """While open, `see` gets the state of every mixer after each `every` tokens, or at the end of each call.

    The mixer's own operator runs piece by piece, each piece from the state that the one before it left.
    """

    def versions(hook: HookPoint, running: list[Mixer], module: Any) -> dict[str, Operator]:
        def watched(operator: Operator) -> Operator:
            names = _parameters(operator)

            @functools.wraps(operator)
            def call(*args: Any, **options: Any) -> Any:
                if not running:
                    return operator(*args, **options)
                mixer, given = running[0], Arguments(names, args, options)

                def between(piece: Arguments, time: int, state: Any) -> Any:
                    see(_reading(mixer, piece, time, state))
                    return state

                return in_pieces(operator, mixer.hook, given, every, between)

            return call

        return {name: watched(getattr(module, name)) for name in hook.operators}

    with replaced(model, mixers, versions):
        yield


def _reading(mixer: Mixer, piece: Arguments, time: int, state: Tensor) -> Reading:
    normalised = piece.options.get("use_qk_l2norm_in_kernel", False)
    queries, keys = (F.normalize(piece[name], dim=-1) if normalised else piece[name] for _, name in roles(mixer.hook))
    value_first = piece.options.get("state_v_first", mixer.hook.value_first)
    return Reading(mixer=mixer, time=time, state=state.mT if value_first else state, queries=queries, keys=keys)


def in_pieces(
    operator: Operator,
    hook: HookPoint,
    given: Arguments,
    every: int | None,
    between: Callable[[Arguments, int, Any], Any],
) -> Any:
    """An operator on `every` tokens after the other.

    Each piece begins with the state that `between` makes of the one that the piece before it left; it gets the
    arguments of that piece too, and how many tokens there were so far.
    """
    state, wanted = given.options.get(hook.initial_state), given.options.get(hook.final_state, False)
    names = (hook.query, hook.key, *hook.key_like, *hook.per_token)
    with_time = [name for name in names if given.get(name) is not None]
    length = given[hook.query].shape[1]
    every = length if every is None else every
    outputs = []
    for start in range(0, length, every):
        piece = given.copy()
        for name in with_time:
            steps = given[name].shape[1] // length  # of a token: several where it makes several updates
            piece[name] = given[name][:, start * steps : (start + every) * steps].contiguous()
        piece.options |= {hook.initial_state: state, hook.final_state: True}
        output, state = operator(*piece.args, **piece.options)
        outputs.append(output)
        state = between(piece, min(start + every, length), state)
    output = torch.cat(outputs, dim=1)
    return (output, state if wanted else None) if wanted or hook.returns_pair else output


@contextmanager
def replaced(
    model: nn.Module, mixers: Sequence[Mixer], versions: Callable[[HookPoint, list[Mixer], Any], dict[str, Operator]]
) -> Iterator[None]:
    """While open, the functions that the mixers call are those that `versions` gives for a hook.

    `versions` also gets a list that holds the mixer whose forward is under way, if it is one of these.
    """
    running: list[Mixer] = []
    with ExitStack() as stack:
        for mixer in mixers:
            module = model.get_submodule(mixer.path)
            enter = module.register_forward_pre_hook(lambda *_, mixer=mixer: running.append(mixer))
            leave = module.register_forward_hook(lambda *_: running.clear())
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        for hook in {mixer.hook for mixer in mixers}:
            owner = importlib.import_module(hook.module)
            for name, version in versions(hook, running, owner).items():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, version)
        yield
