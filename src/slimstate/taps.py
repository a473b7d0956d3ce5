"""See, or change, the queries and keys of a running model just before they enter the state; see the state itself."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstate.axes import Basis, Choice, Mixer, Tap
from slimstate.surgery import kept_channels, turned

Role = Literal["query", "key"]
See = Callable[[Mixer, Role, Tensor], Tensor]
Operator = Callable[..., Any]


@contextmanager
def tapped(model: nn.Module, mixers: Sequence[Mixer], see: See, scale: float | None = None) -> Iterator[None]:
    """While open, the queries and keys [B, T, H, D] of every mixer are what `see` returns, scaled by `scale`."""

    def versions(tap: Tap, running: list[Mixer], module: Any) -> dict[str, Operator]:
        def watched(operator: Operator) -> Operator:
            def call(*, q: Tensor, k: Tensor, **options: Any) -> Any:
                for mixer in running:
                    if tap.normaliser is None:
                        q, k = see(mixer, "query", q), see(mixer, "key", k)
                    if scale is not None:
                        options["scale"] = scale
                return operator(q=q, k=k, **options)

            return call

        def watched_normaliser(normalise: Operator) -> Operator:
            roles: Iterator[Role] = itertools.cycle(("query", "key"))
            return lambda x: normalise(see(running[0], next(roles), x) if running else x)

        replaced = {name: watched(getattr(module, name)) for name in tap.operators}
        if tap.normaliser is not None:
            replaced[tap.normaliser] = watched_normaliser(getattr(module, tap.normaliser))
        return replaced

    with _replaced(model, mixers, versions):
        yield


@contextmanager
def masked(
    model: nn.Module, mixers: Sequence[Mixer], selections: Mapping[int, Choice], *, rescaled: bool = False
) -> Iterator[None]:
    """The cut model without cutting it: dropped channels are zero before the norm.

    Where a basis is kept, the weights are turned by it while this is open: behind an activation, turning the queries
    and keys themselves would be another model than the cut one. `rescaled` also sets the query scale to that of the key
    dim, as a cut does whose norm epsilon is kept.
    """
    masks = {
        mixer.layer: torch.zeros(mixer.axis.heads, mixer.axis.width).scatter_(
            1, kept_channels(selections[mixer.layer]), 1.0
        )
        for mixer in mixers
    }
    key_dim = selections[mixers[0].layer].kept

    def mask(mixer: Mixer, role: Role, x: Tensor) -> Tensor:
        return x * masks[mixer.layer].to(x)

    scale = key_dim**-0.5 if rescaled else None
    with _turned_weights(model, mixers, selections), tapped(model, mixers, mask, scale):
        yield


@contextmanager
def _turned_weights(model: nn.Module, mixers: Sequence[Mixer], selections: Mapping[int, Choice]) -> Iterator[None]:
    """While open, the parameters of every mixer that keeps a basis are turned by it, at the size they have."""
    before: dict[str, Tensor] = {}
    try:
        with torch.inference_mode(False), torch.no_grad():
            for mixer in mixers:
                choice = selections[mixer.layer]
                for slot in mixer.axis.slots if isinstance(choice, Basis) else ():
                    assert isinstance(choice, Basis)
                    parameter = model.get_parameter(mixer.name_of(slot))
                    before.setdefault(mixer.name_of(slot), parameter.detach().clone())
                    parameter.copy_(turned(mixer.axis, slot, choice, parameter.detach()))
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

    def versions(tap: Tap, running: list[Mixer], module: Any) -> dict[str, Operator]:
        def watched(operator: Operator) -> Operator:
            def call(**options: Any) -> Any:
                if not running:
                    return operator(**options)
                return _in_pieces(operator, running[0], options, see, every)

            return call

        return {name: watched(getattr(module, name)) for name in tap.operators}

    with _replaced(model, mixers, versions):
        yield


TIMED = ("q", "k", "v", "g", "beta")


def _in_pieces(
    operator: Operator, mixer: Mixer, options: dict[str, Any], see: Callable[[Reading], None], every: int | None
) -> tuple[Tensor, Tensor | None]:
    timed = {name: options.pop(name) for name in TIMED if options.get(name) is not None}
    state, wanted = options.pop("initial_state", None), options.pop("output_final_state", False)
    length = timed["q"].shape[1]
    every = length if every is None else every
    outputs = []
    for start in range(0, length, every):
        piece = {name: x[:, start : start + every].contiguous() for name, x in timed.items()}
        output, state = operator(**piece, **options, initial_state=state, output_final_state=True)
        outputs.append(output)
        normalised = options.get("use_qk_l2norm_in_kernel", False)
        queries, keys = (F.normalize(x, dim=-1) if normalised else x for x in (piece["q"], piece["k"]))
        by_key = state.mT if options.get("state_v_first", False) else state
        time = min(start + every, length)
        see(Reading(mixer=mixer, time=time, state=by_key, queries=queries, keys=keys))
    return torch.cat(outputs, dim=1), state if wanted else None


@contextmanager
def _replaced(
    model: nn.Module, mixers: Sequence[Mixer], versions: Callable[[Tap, list[Mixer], Any], dict[str, Operator]]
) -> Iterator[None]:
    """While open, the functions that the mixers call are those that `versions` gives for a tap.

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
        for tap in {mixer.tap for mixer in mixers}:
            owner = importlib.import_module(tap.module)
            for name, version in versions(tap, running, owner).items():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, version)
        yield
