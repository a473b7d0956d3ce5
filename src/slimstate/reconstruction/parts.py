"""Find what to train in a layer, its mixer and the norm before it, by observing one run of the layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

NORM = re.compile("norm", re.IGNORECASE)  # in the name of a class
FEED_FORWARD = re.compile("(mlp|moe|moeblock|feedforward)$", re.IGNORECASE)  # ends it


def trained_places(model: nn.Module, mixer: str, run: Callable[[], object]) -> tuple[str, ...]:
    """Return the path of the mixer, and of the norm whose output only it reads; `run` runs the layer."""
    above = mixer.rpartition(".")[0]
    siblings = {f"{above}.{name}": module for name, module in model.get_submodule(above).named_children()}
    called: list[str] = []
    inputs: dict[str, Tensor | None] = {}
    outputs: dict[str, Any] = {}
    with ExitStack() as stack:
        for place, module in siblings.items():

            def enter(_: nn.Module, args: Any, options: Any, place: str = place) -> None:
                called.append(place)
                inputs[place] = args[0] if args else options.get("hidden_states")

            def leave(_: nn.Module, __: Any, output: Any, place: str = place) -> None:
                outputs[place] = output

            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        run()
    kinds = {place: type(siblings[place]).__name__ for place in called}
    norms = [place for place in called if NORM.search(kinds[place]) and outputs[place] is inputs[mixer]]
    others = [
        place
        for place, kind in kinds.items()
        if place != mixer and not FEED_FORWARD.search(kind) and not NORM.search(kind)
    ]
    return (mixer, norms[0]) if norms and not others else (mixer,)
