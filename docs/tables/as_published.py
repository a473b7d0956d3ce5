"""AS_PUBLISHED.md: cuts with the norm epsilon corrected and left alone."""

from __future__ import annotations

from tables.layout import METHODS, MODELS, grid, pairs, record, sweep

KEY_DIMS = (89, 76, 64, 32, 16)
CUTS = {
    title: {
        "corrected": sweep(f"sweep-{name}-main"),
        "as published": sweep(f"sweep-{name}-kept"),
    }
    for title, name in MODELS.items()
}


def _ratio(title: str, key_dim: int, epsilon: str, method: str) -> str:
    return f"{CUTS[title][epsilon][method, 'kq', key_dim]['word_ratio']:.3f}"


def _cost(title: str, key_dim: int, method: str) -> str:
    published, corrected = (CUTS[title][kind][method, "kq", key_dim] for kind in ("as published", "corrected"))
    return f"{published['word_ratio'] / corrected['word_ratio']:.3f}"


def _uncut(name: str, field: str) -> float:
    return record(f"sweep-{name}-main")["uncut"][field]


PLACES = pairs(dict.fromkeys(MODELS, KEY_DIMS))
TABLES = {
    "epsilon-ratios": grid(
        ("model", "key dim", "epsilon"),
        [(*place, epsilon) for place in PLACES for epsilon in ("corrected", "as published")],
        METHODS,
        _ratio,
    ),
    "epsilon-cost": grid(("model", "key dim"), PLACES, METHODS, _cost),
}
NUMBERS = {
    "uncut-gated": f"{_uncut('gated_deltanet-31m', 'word_perplexity'):.2f}",
    "uncut-delta": f"{_uncut('delta_net-30m', 'word_perplexity'):.2f}",
}
