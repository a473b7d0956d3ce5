"""See, or change, the queries and keys of a running model just before they enter the state."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slimstate.axes import Mixer, Selection, Tap

Role = Literal["query", "key"]
See = Callable[[Mixer, Role, Tensor], Tensor]


@contextmanager
def tapped(model: nn.Module, mixers: Sequence[Mixer], see: See, scale: float | None = None) -> Iterator[None]:
    """While open, the queries and keys [B, T, H, D] of every mixer are what `see` returns, scaled by `scale`."""
    running: list[Mixer] = []  # the mixer whose forward is under way, if it is one of these
    with ExitStack() as stack:
        for mixer in mixers:
            module = model.get_submodule(mixer.path)
            enter = module.register_forward_pre_hook(lambda *_, mixer=mixer: running.append(mixer))
            leave = module.register_forward_hook(lambda *_: running.clear())
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        for tap in {mixer.tap for mixer in mixers}:
            stack.enter_context(_patched(tap, running, see, scale))
        yield


def masked(
    model: nn.Module, mixers: Sequence[Mixer], selections: Mapping[int, Selection], *, rescaled: bool = False
) -> AbstractContextManager[None]:
    """The cut model without cutting it: dropped channels are zero before the norm.

    `rescaled` also sets the query scale to that of the key dim, as a cut does whose norm epsilon is kept.
    """
    masks = {
        mixer.layer: torch.zeros(mixer.axis.heads, mixer.axis.width).scatter_(1, selections[mixer.layer].keep, 1.0)
        for mixer in mixers
    }
    key_dim = selections[mixers[0].layer].keep.shape[1]

    def mask(mixer: Mixer, role: Role, x: Tensor) -> Tensor:
        return x * masks[mixer.layer].to(x)

    return tapped(model, mixers, mask, scale=key_dim**-0.5 if rescaled else None)


@contextmanager
def _patched(tap: Tap, running: list[Mixer], see: See, scale: float | None) -> Iterator[None]:
    module = importlib.import_module(tap.module)

    def watched(operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*, q: Tensor, k: Tensor, **options: Any) -> Any:
            for mixer in running:
                if tap.normaliser is None:
                    q, k = see(mixer, "query", q), see(mixer, "key", k)
                if scale is not None:
                    options["scale"] = scale
            return operator(q=q, k=k, **options)

        return call

    def watched_normaliser(normalise: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        roles: Iterator[Role] = itertools.cycle(("query", "key"))
        return lambda x: normalise(see(running[0], next(roles), x) if running else x)

    replaced = {name: watched(getattr(module, name)) for name in tap.operators}
    if tap.normaliser is not None:
        replaced[tap.normaliser] = watched_normaliser(getattr(module, tap.normaliser))
    originals = {name: getattr(module, name) for name in replaced}
    for name, version in replaced.items():
        setattr(module, name, version)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
