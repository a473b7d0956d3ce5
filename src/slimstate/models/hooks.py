"""Read or change the queries and keys of a running model just before they enter the state, and read the state.

While a context is open, functions that mixers call are replaced; hooks of PyTorch tell which mixer is running.
"""

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstate.core.layout import HookPoint, Mixer, ValueAxis
from slimstate.core.selection import Basis, Choice
from slimstate.core.surgery import Cutter, dropped_channels, head_moves, remaining_channels, rotated
from slimstate.system.value import Value

Role = Literal["query", "key", "key-like"]
Transform = Callable[[Mixer, Role, Tensor], Tensor]
Operator = Callable[..., Any]


class Arguments(dict[str, Any]):
    """The arguments of a call by name; positional ones stay positional, because kernels name them differently."""

    def __init__(self, values: Mapping[str, Any], positional: int) -> None:
        super().__init__(values)
        self.positional = positional

    def pass_to(self, operator: Operator) -> Any:
        items = list(self.items())
        return operator(*(value for _, value in items[: self.positional]), **dict(items[self.positional :]))


# called in place of an operator, with the operator, the mixer that calls it, and the arguments
Wrapper = Callable[[Operator, Mixer, Arguments], Any]


def roles(hook: HookPoint) -> tuple[tuple[Role, str], ...]:
    """Return the arguments that take the queries and the keys."""
    return ("query", hook.query), ("key", hook.key)


def _transform(transform: Transform, mixer: Mixer, role: Role, x: Tensor) -> Tensor:
    """Return x transformed; it may have a copy of each head for every value head, and may have no time axis."""
    if x.ndim == 3:
        return _transform(transform, mixer, role, x.unsqueeze(1)).squeeze(1)
    copies = x.shape[2] // mixer.axis.heads
    slot = mixer.query if role == "query" else mixer.key
    distinct = slot.copies if slot.copies == copies else 1  # copies that differ, as queries of one key head may
    result = torch.stack([transform(mixer, role, x[:, :, copy::copies]) for copy in range(distinct)], 3)
    return result.expand(-1, -1, -1, copies, -1).flatten(2, 3)


def hooked(
    model: nn.Module, mixers: Sequence[Mixer], transform: Transform, scale: float | None = None
) -> AbstractContextManager[None]:
    """Transform the queries and keys [B, T, H, D] of every mixer while this is open; `scale` is the query scale."""

    def transform_inputs(operator: Operator, mixer: Mixer, arguments: Arguments) -> Any:
        hook = mixer.hook
        if hook.normaliser is None:
            for role, name in (*roles(hook), *(("key-like", name) for name in hook.key_like)):
                arguments[name] = _transform(transform, mixer, role, arguments[name])
        result = arguments.pass_to(operator)
        if scale is None or not hook.scales_queries:
            return result
        factor = scale * arguments[hook.query].shape[-1] ** 0.5
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

    def wrappers(hook: HookPoint) -> dict[str, Wrapper]:
        order: Iterator[Role] = itertools.cycle(("query", "key"))

        def transform_next(normalise: Operator, mixer: Mixer, arguments: Arguments) -> Any:
            return normalise(*(transform(mixer, next(order), x) for x in arguments.values()))

        normaliser = {} if hook.normaliser is None else {hook.normaliser: transform_next}
        return {**dict.fromkeys(hook.every_operator, transform_inputs), **normaliser}

    return replaced(model, mixers, wrappers)


@contextmanager
def masked(
    model: nn.Module, mixers: Sequence[Mixer], selections: Mapping[int, Choice], *, rescaled: bool = False,
    head: int | None = None,
) -> Iterator[None]:  # fmt: skip
    """Make the model compute what the cut model would, without a cut: dropped channels are zero before the norm.

    Where a basis is kept, the weights are rotated by it while this is open: rotating the queries and keys behind an
    activation would not be the cut model. So are they changed for heads that are made from others, and for dropped
    values, whose rows and columns are zero. `rescaled` also sets the query scale to that of the key dim, as a cut does
    whose norm epsilon is kept. With `head`, the other heads keep all channels.
    """
    masks = {}
    for mixer in mixers:
        zeros = torch.zeros(mixer.axis.heads, mixer.axis.width)
        masks[mixer.layer] = zeros.scatter_(1, remaining_channels(selections[mixer.layer]), 1.0)
        if head is not None:
            masks[mixer.layer][torch.arange(mixer.axis.heads) != head] = 1.0
    key_dim = selections[mixers[0].layer].key_dim

    def mask(mixer: Mixer, role: Role, x: Tensor) -> Tensor:
        return x if key_dim == mixer.axis.width else x * masks[mixer.layer].to(x)  # of features there may be more

    scale = key_dim**-0.5 if rescaled else None
    with _changed_weights(model, mixers, selections), hooked(model, mixers, mask, scale):
        yield


@contextmanager
def _changed_weights(model: nn.Module, mixers: Sequence[Mixer], selections: Mapping[int, Choice]) -> Iterator[None]:
    """Change the parameters of mixers whose heads move, that keep a basis, or drop values, while this is open."""
    originals: dict[str, Tensor] = {}

    def parameter_of(mixer: Mixer, name: str) -> Tensor:
        parameter = model.get_parameter(mixer.running_name(name))
        originals.setdefault(mixer.running_name(name), parameter.detach().clone())
        return parameter

    def mask_values(mixer: Mixer, axis: ValueAxis, choice: Choice, values: Tensor) -> None:
        joined = {part for _, parts in mixer.joined if len(parts) > 1 for part in parts}
        for slot in (slot for slot in axis.slots if slot.parameter not in joined):  # filters map 0 to 0
            parameter = parameter_of(mixer, slot.parameter)
            rows = axis.rows(slot, dropped_channels(axis.width, values)).flatten()
            parameter.index_fill_(slot.dim, rows.to(parameter.device), 0.0)
        stored = {mixer.stored_name(name): name for pair in axis.bottlenecks for name in pair}
        pairs = {name: parameter_of(mixer, parameter) for name, parameter in stored.items()}
        cutter = Cutter([mixer], {mixer.layer: choice}, read=pairs.__getitem__)
        narrow = {name: cutter.apply(name, tensor) for name, tensor in pairs.items()}
        for name, tensor in pairs.items():  # at their full size
            count, columns = narrow[name].shape
            is_first = columns == tensor.shape[1]
            rows = torch.arange(count) if is_first else cutter.remaining_rows(name, len(tensor))
            tensor.zero_()[rows.to(tensor.device), :columns] = narrow[name]

    try:
        with torch.inference_mode(False), torch.no_grad():
            for mixer in mixers:
                choice, axis = selections[mixer.layer], mixer.value_axis
                for slot, move in head_moves(mixer, choice):
                    parameter = parameter_of(mixer, slot.parameter)
                    parameter.copy_(move(parameter.detach()))
                for slot in mixer.axis.slots if isinstance(choice, Basis) else ():
                    assert isinstance(choice, Basis)
                    parameter = parameter_of(mixer, slot.parameter)
                    parameter.copy_(rotated(mixer.axis, slot, choice, parameter.detach()))
                if choice.values is not None and axis is not None:
                    mask_values(mixer, axis, choice, choice.values)
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for name, values in originals.items():
                model.get_parameter(name).copy_(values)


class StateReading(Value):
    """The state [B, G, K, V] of a mixer, and the queries and keys [B, t, H, K] since the previous reading.

    G value heads, a multiple of the H query/key heads. `time` counts the tokens since the model was called.
    """

    mixer: Mixer
    time: int
    state: Tensor
    queries: Tensor
    keys: Tensor


def observed(
    model: nn.Module, mixers: Sequence[Mixer], read: Callable[[StateReading], None], every: int | None = None
) -> AbstractContextManager[None]:
    """Call `read` with the state of every mixer after each `every` tokens, or at the end of each call of the model.

    The mixer's own operator runs piece by piece, each from the state after the piece before it.
    """

    def read_pieces(operator: Operator, mixer: Mixer, arguments: Arguments) -> Any:
        def between(piece: Arguments, time: int, state: Any) -> Any:
            values = state[-1] if mixer.hook.initial_key_state else state
            values = values.mT if piece.get("state_v_first", mixer.hook.value_first) else values
            pair = (piece[name] for _, name in roles(mixer.hook))
            if piece.get("use_qk_l2norm_in_kernel", False):
                pair = (F.normalize(x, dim=-1) for x in pair)
            queries, keys = pair
            read(StateReading(mixer=mixer, time=time, state=values, queries=queries, keys=keys))
            return state

        return in_pieces(operator, mixer.hook, arguments, every, between)

    return replaced(model, mixers, lambda hook: dict.fromkeys(hook.operators, read_pieces))


def in_pieces(
    operator: Operator, hook: HookPoint, arguments: Arguments, every: int | None,
    between: Callable[[Arguments, int, Any], Any],
) -> Any:  # fmt: skip
    """Run an operator on pieces of `every` tokens, one after the other.

    `between` gets the arguments of a piece, the number of tokens so far and the state after it, a tuple if there are
    two, and returns the state that the next piece starts from.
    """
    states, needs_state = [arguments.get(name) for name in hook.initial_states], arguments.get(hook.final_state, False)
    names = (hook.query, hook.key, *hook.key_like, *hook.per_token)
    with_time = [name for name in names if arguments.get(name) is not None]
    length = arguments[hook.query].shape[1]
    updates = hook.updates if arguments[hook.key].shape[1] == length else 1  # of a token, along the queries
    every = length if every is None else every * updates
    outputs = []
    for start in range(0, length, every):
        piece = Arguments(arguments, arguments.positional)
        for name in with_time:
            steps = arguments[name].shape[1] // length  # updates per token
            piece[name] = arguments[name][:, start * steps : (start + every) * steps].contiguous()
        piece.update({**dict(zip(hook.initial_states, states, strict=True)), hook.final_state: True})
        output, *states = piece.pass_to(operator)
        outputs.append(output)
        state = between(piece, min(start + every, length) // updates, states[0] if len(states) == 1 else tuple(states))
        states = [state] if len(states) == 1 else list(state)
    output = torch.cat(outputs, dim=1)
    return (output, *(states if needs_state else [None] * len(states))) if needs_state or hook.returns_pair else output


@contextmanager
def replaced(
    model: nn.Module, mixers: Sequence[Mixer], wrappers: Callable[[HookPoint], Mapping[str, Wrapper]]
) -> Iterator[None]:
    """Replace functions that the mixers call while this is open; `wrappers` returns those of a hook by name."""
    running: list[Mixer] = []

    def enter(mixer: Mixer) -> None:
        running[:] = [mixer]  # an earlier one is still there if it raised

    def route(operator: Operator, wrapper: Wrapper) -> Operator:
        names = tuple(inspect.signature(operator).parameters)

        @functools.wraps(operator)
        def call(*args: Any, **options: Any) -> Any:
            if not running:
                return operator(*args, **options)
            values = {**dict(zip(names, args, strict=False)), **options}
            return wrapper(operator, running[0], Arguments(values, len(args)))

        return call

    with ExitStack() as stack:
        for mixer in mixers:
            module = model.get_submodule(mixer.path)
            stack.enter_context(module.register_forward_pre_hook(lambda *_, mixer=mixer: enter(mixer)))
            stack.enter_context(module.register_forward_hook(lambda *_: running.clear()))
        for hook in {mixer.hook for mixer in mixers}:
            owner = importlib.import_module(hook.module)
            for name, wrapper in wrappers(hook).items():
                operator = getattr(owner, name)
                stack.callback(setattr, owner, name, operator)
                setattr(owner, name, route(operator, wrapper))
        yield
