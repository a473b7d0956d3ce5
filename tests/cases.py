"""A made-up mixer for selectors to choose from."""

from __future__ import annotations

from dataclasses import replace

import torch

from slimstate.core.evidence import Evidence
from slimstate.selectors import Case


def case(heads: int = 3, width: int = 12, size: int = 20, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries, keys = draw(heads, 60, width), draw(heads, 60, width)
    evidence = Evidence(
        tokens=60,
        query_gram=queries.mT @ queries,
        key_gram=keys.mT @ keys,
        input_square=draw(size).square(),
        query_gradient=draw(heads, width, size),
        key_gradient=draw(heads, width, size),
    )
    weights = draw(heads, width, size), draw(heads, width, size)
    felt = draw(heads, 60, 1).square()  # how much the loss feels each token
    evidence = replace(evidence, query_weighted=queries.mT @ (felt * queries), key_weighted=keys.mT @ (felt * keys))
    return Case(heads=heads, width=width, query_weight=weights[0], key_weight=weights[1], evidence=evidence)


def changed(original: Case, by_channel) -> Case:
    """The case with its channels passed through a [H, D, n] -> [H, D, n] function, on both sides of a Gram matrix."""
    evidence = original.evidence
    assert evidence is not None

    def both_sides(*grams: torch.Tensor) -> list[torch.Tensor]:
        return [by_channel(by_channel(gram).mT).mT for gram in grams]

    grams = both_sides(evidence.query_gram, evidence.key_gram)
    weighted = both_sides(evidence.query_weighted, evidence.key_weighted)
    gradients = (by_channel(gradient) for gradient in (evidence.query_gradient, evidence.key_gradient))
    weights = (by_channel(weight) for weight in (original.query_weight, original.key_weight))
    return Case(
        heads=original.heads,
        width=original.width,
        **dict(zip(("query_weight", "key_weight"), weights, strict=True)),
        evidence=Evidence(
            tokens=evidence.tokens,
            input_square=evidence.input_square,
            **dict(zip(("query_gram", "key_gram"), grams, strict=True)),
            **dict(zip(("query_weighted", "key_weighted"), weighted, strict=True)),
            **dict(zip(("query_gradient", "key_gradient"), gradients, strict=True)),
        ),
    )
