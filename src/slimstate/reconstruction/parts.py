"""The parts of a layer that matter to a reconstruction: its mixer, the norm before it, and what comes behind.

They are found by watching one run of the layer. The error of a cut is seen behind the mixer, in the residual stream:
there the layer is run with its MLP or experts giving zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

FEED_FORWARD = re.compile("(mlp|moe|moeblock|feedforward)$", re.IGNORECASE)  # ends the name of a class
NORM = re.compile("norm", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The place of the mixer, that of the norm whose output it alone takes, and what an MLP or experts return."""

    mixer: str
    norm: str | None
    feed_forward: Mapping[str, Any]

    @property
    def trained(self) -> tuple[str, ...]:
        return (self.mixer,) if self.norm is None else (self.mixer, self.norm)

    @contextmanager
    def behind_mixer(self, model: nn.Module) -> Iterator[None]:
        """While open, the layer gives what the residual stream is behind its mixer."""
        with ExitStack() as stack:
            for place, returned in self.feed_forward.items():
                module = model.get_submodule(place)
                stack.callback(setattr, module, "forward", module.forward)
                module.forward = partial(_nothing, returned)
            yield


def find_parts(model: nn.Module, mixer: str, run: Callable[[], object]) -> Parts:
    """Watch one `run` of the layer that holds this mixer."""
    above = mixer.rpartition(".")[0]
    siblings = {f"{above}.{name}": module for name, module in model.get_submodule(above).named_children()}
    called: list[str] = []
    taken: dict[str, Tensor | None] = {}
    given: dict[str, Any] = {}
    with ExitStack() as stack:
        for place, module in siblings.items():

            def enter(_: nn.Module, args: Any, options: Any, place: str = place) -> None:
                called.append(place)
                taken[place] = args[0] if args else options.get("hidden_states")

            def leave(_: nn.Module, __: Any, output: Any, place: str = place) -> None:
                given[place] = output

            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        run()
    kinds = {place: type(siblings[place]).__name__ for place in called}
    feeding = [place for place in called if FEED_FORWARD.search(kinds[place]) and place != mixer]
    norms = [place for place in called if NORM.search(kinds[place]) and given[place] is taken[mixer]]
    others = [place for place in called if place not in (mixer, *feeding) and not NORM.search(kinds[place])]
    return Parts(
        mixer=mixer,
        norm=norms[0] if norms and not others else None,
        feed_forward={place: given[place] for place in feeding},
    )


def _nothing(like: Any, hidden: Tensor, *args: Any, **options: Any) -> Any:
    """Zeros for the first of what an MLP returns; what it gives beside them stays."""
    nothing = torch.zeros_like(hidden)
    return (nothing, *like[1:]) if isinstance(like, tuple) else nothing
