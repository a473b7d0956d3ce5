"""EXPERIMENTS.md, without its part on recovery: what methods cost, beside the paper's numbers."""

from __future__ import annotations

from typing import Any

from tables.layout import METHODS, MODELS, grid, large, pairs, record, sweep, table

FILTERS = {"own": "own", "one for each head": "head", "one for all heads": "all"}
COMPONENTS = ("pca", "pca-adversarial", "pca-released", "pca-released-adversarial")
ROTATIONS = [*((method, score) for method in COMPONENTS for score in ("kq", "k")), ("random-rotation", "kq")]
# the methods that the paper and we ran on shared filters, with the score they choose by
ON_FILTERS = {"pca-adversarial": "k", "pca": "k", "pca-released-adversarial": "k", "pca-released": "k"} | {
    "random-rotation": "kq",
    "grad": "kq",
}


def _sweeps(*kinds: str, bundled: str = "bundled") -> dict[str, dict[tuple[str, str, int], dict[str, Any]]]:
    """Return the sweeps of the two 30M models and of the bundled one."""
    found = {title: sweep(*(f"sweep-{name}-{kind}" for kind in kinds)) for title, name in MODELS.items()}
    return {**found, "bundled": sweep(bundled)}


MAIN, SCORES = _sweeps("main"), _sweeps("scores")
ROTATED = _sweeps("rotations", bundled="bundled-rotations")


SWEEPS = {title: record("shared-filters")[name]["sweeps"] for title, name in FILTERS.items()}
SHARED = {title: sweep(*sweeps) for title, sweeps in SWEEPS.items()}
UNCUT_SHARED = {title: first["uncut"]["word_perplexity"] for title, (first, *_) in SWEEPS.items()}
HYBRID, MAMBA2 = (record("hybrids")[name]["sweep"] for name in ("qwen3_next", "mamba2"))
PAPER_FILTERS = {f"the paper, {kind}": kind for kind in ("own", "shared")}


def _on_filters(filters: str, _: str, removed: str, method: str) -> str:
    if filters in SHARED:
        key_dim = {"50": 64, "75": 32}[removed]
        return large(SHARED[filters][method, ON_FILTERS[method], key_dim]["word_perplexity"])
    number = record("paper")["principal_components"][PAPER_FILTERS[filters]].get(method, {}).get(removed)
    return "" if number is None else f"{number:.1f}" if number < 1e4 else f"{number:.1e}".replace("e+0", "e")


def _filter_places() -> list[tuple[str, str, str]]:
    paper = record("paper")["principal_components"]["uncut"]
    uncut = UNCUT_SHARED | {title: paper[kind] for title, kind in PAPER_FILTERS.items()}
    return [(title, f"{perplexity:.1f}", removed) for title, perplexity in uncut.items() for removed in ("50", "75")]


def _filters() -> list[dict[str, Any]]:
    paper = record("paper")["shared_filters"]
    return [
        {"filters": title, "ours": UNCUT_SHARED[title], **dict(zip(paper["columns"], paper["rows"][name], strict=True))}
        for title, name in FILTERS.items()
    ]


def _conditions() -> list[dict[str, Any]]:
    main, scores = MAIN["DeltaNet 30M"], SCORES["DeltaNet 30M"]
    chosen = {f"`{method}`": main[method, "kq", 64] for method in METHODS}
    chosen["`drrqr` by keys alone"] = scores["drrqr", "k", 64]
    return [{"channels": title, **row} for title, row in chosen.items()]


def _utilisation(title: str, _: str, key_dim: int, method: str) -> str:
    return f"{MAIN[title][method, 'kq', key_dim]['rank_utilisation']:.3f}"


USED = {title: f"{record(f'sweep-{name}-main')['uncut']['rank_utilisation']:.3f}" for title, name in MODELS.items()}
UNCUT = record("sweep-delta_net-30m-main")["uncut"]
TABLES = {
    "methods": grid(
        ("model", "key dim"),
        pairs({**dict.fromkeys(MODELS, (96, 80, 64, 32, 16)), "bundled": (96, 80, 64, 32)}),
        METHODS,
        lambda model, key_dim, method: f"{MAIN[model][method, 'kq', key_dim]['word_ratio']:.3f}",
    ),
    "scores": grid(
        ("model", "score"),
        pairs(dict.fromkeys(SCORES, ("kq", "k", "q"))),
        METHODS[1:],
        lambda model, score, method: f"{SCORES[model][method, score, 64]['word_ratio']:.3f}",
    ),
    "condition-numbers": table(
        {
            "channels chosen by": "{channels}",
            "median condition number": "{kappa:,.0f}",
            "perplexity ratio": "{word_ratio:.3f}",
        },
        _conditions(),
    ),
    "rotations": grid(
        ("method", "score"),
        ROTATIONS,
        pairs(dict.fromkeys(ROTATED, (64, 32))),
        lambda method, score, place: large(ROTATED[place[0]][method, score, place[1]]["word_ratio"]),
    ),
    "filters": table(
        {
            "filters": "{filters}",
            "ours, 5M: WikiText": "{ours:.1f}",
            "the paper, 370M: WikiText": "{WikiText:.1f}",
            "LAMBADA": "{LAMBADA:.1f}",
            "average of tasks": "{average of tasks:.1f}",
        },
        _filters(),
    ),
    "filters-components": grid(("filters", "uncut", "removed, %"), _filter_places(), ON_FILTERS, _on_filters),
    "filters-methods": grid(
        ("filters", "uncut", "key dim"),
        [(title, f"{UNCUT_SHARED[title]:.1f}", key_dim) for title in SHARED for key_dim in (96, 80, 64, 32)],
        METHODS,
        lambda filters, _, key_dim, method: f"{SHARED[filters][method, 'kq', key_dim]['word_ratio']:.3f}",
    ),
    **{
        name: grid(
            ("key dim",),
            [(64,), (32,), (16,)],
            METHODS,
            lambda key_dim, method, rows=rows: f"{rows[method, 'kq', key_dim]['word_ratio']:.3f}",
        )
        for name, rows in (("hybrid", sweep(HYBRID)), ("mamba2", sweep(MAMBA2)))
    },
    "utilisation": grid(
        ("model", "uncut", "key dim"),
        [(title, uncut, key_dim) for title, uncut in USED.items() for key_dim in (64, 32, 16)],
        METHODS,
        _utilisation,
    ),
}
NUMBERS = {
    "hybrid-perplexity": f"{HYBRID['uncut']['word_perplexity']:.1f}",
    **{
        f"mamba2-{method}": f"{sweep(MAMBA2)[method, 'kq', 64]['nats_over_uncut']:.3f}"
        for method in ("random", "grad", "drrqr")
    },
    "mamba2-perplexity": f"{MAMBA2['uncut']['word_perplexity']:.1f}",
    "wikitext-tokens": f"{UNCUT['tokens']:,}",
    "wikitext-bytes": f"{UNCUT['bytes']:,}",
} | {f"scores-bundled-{score}": f"{SCORES['bundled']['grad', score, 64]['word_ratio']:.3f}" for score in ("kq", "q")}
