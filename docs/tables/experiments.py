"""EXPERIMENTS.md, without its part on recovery: what methods cost, beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables.layout import METHODS, Row, grid, large, record, sweep, table

MODELS = {"DeltaNet 30M": "delta_net-30m", "Gated 31M": "gated_deltanet-31m"}
PAPER_MODELS = {
    "DeltaNet 370M": "delta_net-370m",
    "DeltaNet 1.3B": "delta_net-1.3b",
    "Gated 370M": "gated_deltanet-370m",
    "Gated 1.3B": "gated_deltanet-1.3b",
}
FILTERS = {"own": "own", "one for each head": "head", "one for all heads": "all"}
COMPONENTS = ("pca", "pca-adversarial", "pca-released", "pca-released-adversarial")
ROTATIONS = {f"{method}, {score}": (method, score) for method in COMPONENTS for score in ("kq", "k")} | {
    "random-rotation": ("random-rotation", "kq")
}
# the methods that the paper and we ran on shared filters, with the score they choose by
ON_FILTERS = {"pca-adversarial": "k", "pca": "k", "pca-released-adversarial": "k", "pca-released": "k"} | {
    "random-rotation": "kq",
    "grad": "kq",
}


def _sweeps(*kinds: str, bundled: str = "bundled") -> dict[str, dict[tuple[str, str, int], dict[str, Any]]]:
    """Return the sweeps of the two 30M models and of the bundled one."""
    found = {title: sweep(*(f"sweep-{name}-{kind}" for kind in kinds)) for title, name in MODELS.items()}
    return {**found, "bundled": sweep(bundled)}


MAIN, ALL, SCORES = _sweeps("main"), _sweeps("main", "exact"), _sweeps("scores")
ROTATED = _sweeps("rotations", bundled="bundled-rotations")


def _with_uncut(title: str, perplexity: float, digits: int = 1) -> str:
    """Return the title of a group of columns with the perplexity of the uncut model."""
    return f"{title}, uncut {perplexity:.{digits}f}"


def _by_title(sweeps: Mapping[str, Row], digits: int) -> dict[str, dict[tuple[str, str, int], dict[str, Any]]]:
    return {
        _with_uncut(title, result["uncut"]["perplexity"], digits): sweep(result) for title, result in sweeps.items()
    }


SHARED = {title: record("shared-filters")[name]["sweep"] for title, name in FILTERS.items()}
ON_SHARED = _by_title(SHARED, 1)
TRAINED = _by_title(
    {"hybrid": record("hybrids")["qwen3_next"]["sweep"], "Mamba-2": record("hybrids")["mamba2"]["sweep"]}, 2
)
PAPER_FILTERS = {
    _with_uncut(f"the paper, {kind}", perplexity): kind
    for kind, perplexity in record("paper")["principal_components"]["uncut"].items()
}


def _paper_ratio(cut: float, model: str) -> str:
    ratio = cut / record("paper")["word_perplexity"][PAPER_MODELS[model]]["uncut"]
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


def _paper_method(method: str, model: str, compression: str) -> str:
    cut = record("paper")["word_perplexity"][PAPER_MODELS[model]]["cut"]
    return _paper_ratio(cut[method][compression.removesuffix(" %")], model)


def _paper_score(method: str, model: str, score: str) -> str:
    return _paper_ratio(record("paper")["word_perplexity_by_score"]["cut"][method][PAPER_MODELS[model]][score], model)


def _on_filters(method: str, group: str, compression: str) -> str:
    if group in ON_SHARED:
        return large(ON_SHARED[group][method, ON_FILTERS[method], {"50 %": 64, "75 %": 32}[compression]]["perplexity"])
    paper = record("paper")["principal_components"][PAPER_FILTERS[group]]
    number = paper.get(method, {}).get(compression.removesuffix(" %"))
    return "" if number is None else f"{number:.1f}" if number < 1e4 else f"{number:.1e}".replace("e+0", "e")


def _filters() -> list[dict[str, Any]]:
    paper = record("paper")["shared_filters"]
    return [
        {"filters": title, **SHARED[title]["uncut"], **dict(zip(paper["columns"], paper["rows"][name], strict=True))}
        for title, name in FILTERS.items()
    ]


def _conditions() -> list[dict[str, Any]]:
    main, scores = MAIN["DeltaNet 30M"], SCORES["DeltaNet 30M"]
    chosen = {f"`{method}`": main[method, "kq", 64] for method in METHODS}
    chosen["`drrqr` by keys alone"] = scores["drrqr", "k", 64]
    return [{"channels": title, **row} for title, row in chosen.items()]


USED = {
    f"{title}, uncut {record(f'sweep-{name}-main')['uncut']['rank_utilisation']:.3f}": MAIN[title]
    for title, name in MODELS.items()
}
UNCUT = record("sweep-delta_net-30m-main")["uncut"]
TABLES = {
    "methods-per-word": grid(
        "method",
        METHODS,
        {**dict.fromkeys(MODELS, (89, 76, 64, 32, 16)), "bundled": (96, 80, 64, 32)},
        lambda method, model, key_dim: f"{ALL[model][method, 'kq', key_dim]['word_ratio']:.3f}",
    ),
    "methods-per-token": grid(
        "method",
        METHODS,
        {**dict.fromkeys(MODELS, (96, 80, 64, 32, 16)), "bundled": (96, 80, 64, 32)},
        lambda method, model, key_dim: f"{MAIN[model][method, 'kq', key_dim]['token_ratio']:.3f}",
    ),
    "methods-paper": grid(
        "method", METHODS, dict.fromkeys(PAPER_MODELS, ("30 %", "40 %", "50 %", "75 %")), _paper_method
    ),
    "scores": grid(
        "method",
        METHODS[1:],
        dict.fromkeys(SCORES, ("kq", "k", "q")),
        lambda method, model, score: f"{SCORES[model][method, score, 64]['word_ratio']:.3f}",
    ),
    "scores-paper": grid("method", METHODS[1:], dict.fromkeys(PAPER_MODELS, ("kq", "k", "q")), _paper_score),
    "condition-numbers": table(
        {
            "channels chosen by": "{channels}",
            "median condition number": "{kappa:,.0f}",
            "perplexity ratio": "{word_ratio:.3f}",
        },
        _conditions(),
    ),
    "rotations": grid(
        "method, score",
        ROTATIONS,
        dict.fromkeys(ROTATED, (64, 32)),
        lambda name, model, key_dim: large(ROTATED[model][(*ROTATIONS[name], key_dim)]["word_ratio"]),
    ),
    "filters": table(
        {
            "filters": "{filters}",
            "ours, perplexity per token": "{perplexity:.1f}",
            "per word": "{word_perplexity:,.0f}",
            "the paper, 370M: WikiText": "{WikiText:.1f}",
            "LAMBADA": "{LAMBADA:.1f}",
            "average of tasks": "{average of tasks:.1f}",
        },
        _filters(),
    ),
    "filters-components": grid(
        "method", ON_FILTERS, dict.fromkeys((*ON_SHARED, *PAPER_FILTERS), ("50 %", "75 %")), _on_filters
    ),
    "filters-methods": grid(
        "method",
        METHODS,
        dict.fromkeys(ON_SHARED, (96, 80, 64, 32)),
        lambda method, filters, key_dim: f"{ON_SHARED[filters][method, 'kq', key_dim]['perplexity']:.1f}",
    ),
    "hybrids": grid(
        "method",
        METHODS,
        dict.fromkeys(TRAINED, (96, 80, 64, 32)),
        lambda method, model, key_dim: f"{TRAINED[model][method, 'kq', key_dim]['perplexity']:.2f}",
    ),
    "utilisation": grid(
        "method",
        METHODS,
        dict.fromkeys(USED, (64, 32, 16)),
        lambda method, model, key_dim: f"{USED[model][method, 'kq', key_dim]['rank_utilisation']:.3f}",
    ),
}
NUMBERS = {
    "words-per-token": f"{UNCUT['words'] / UNCUT['tokens']:.3f}",
    "wikitext-tokens": f"{UNCUT['tokens']:,}",
    "wikitext-words": f"{UNCUT['words']:,}",
    "wikitext-bytes": f"{UNCUT['bytes']:,}",
}
