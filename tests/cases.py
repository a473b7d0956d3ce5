"""A random mixer for selectors to choose from, and the cut of all tensors of a model."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from slimstate.core.evidence import Evidence
from slimstate.core.layout import Mixer
from slimstate.core.selection import Choice
from slimstate.core.surgery import Cutter
from slimstate.selectors import Case


def case(heads: int = 3, width: int = 12, size: int = 20, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries, keys = draw(heads, 60, width), draw(heads, 60, width)
    grams = {"query_gram": queries.mT @ queries, "key_gram": keys.mT @ keys}
    evidence = Evidence(tokens=60, **grams, input_square=draw(size).square())
    sums = {f"{role}_gradient": draw(heads, width, size) for role in ("query", "key")}
    weights = draw(heads, width, size), draw(heads, width, size)
    weight = draw(heads, 60, 1).square()  # of each token
    sums |= {"query_weighted": queries.mT @ (weight * queries), "key_weighted": keys.mT @ (weight * keys)}
    evidence = replace(evidence, **sums)
    return Case(heads=heads, width=width, query_weight=weights[0], key_weight=weights[1], evidence=evidence)


def changed(original: Case, by_channel) -> Case:
    """Apply a function [H, D, n] -> [H, D, n] to the channels of a case, and to both sides of its Gram matrices."""
    evidence = original.evidence
    assert evidence is not None

    def apply(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return by_channel(by_channel(tensor).mT).mT if name.endswith(("gram", "weighted")) else by_channel(tensor)

    sums = {name: apply(name, tensor) for name, tensor in evidence.tensors() if name != "input_square"}
    weights = {name: by_channel(getattr(original, name)) for name in ("query_weight", "key_weight")}
    return replace(original, **weights, evidence=replace(evidence, **sums))


def cut(tensors: Mapping[str, Tensor], mixers: Iterable[Mixer], selections: Mapping[int, Choice]) -> dict[str, Tensor]:
    """Return all parameters of a model after a cut."""
    cutter = Cutter(mixers, selections, read=tensors.__getitem__)
    return {name: cutter.apply(name, tensor) for name, tensor in tensors.items()}
