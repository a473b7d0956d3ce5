"""BESIDE_THE_PAPER.md: the paper's tables and figures, what reproduces them, and what our small models give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from slimstate.workflows.run import Recipe
from tables.layout import (
    DOCS,
    METHODS,
    MODELS,
    PAPER_MODELS,
    RECORDS,
    grid,
    large,
    markdown,
    only,
    pairs,
    percent,
    record,
    table,
    timings,
)

RECOVERED = record("bundled-recovery")
TIMED = {"DeltaNet 2.7B": "delta_net-2.7b"}
REMOVED = ("30", "40", "50", "75")
SCORES = ("kq", "k", "q")
TASKS = {
    "ARC-e": "arc_easy", "ARC-c": "arc_challenge", "HellaSwag": "hellaswag", "Winogrande": "winogrande",
    "PIQA": "piqa", "LAMBADA": "lambada", "average": "average",
}  # fmt: skip
RECALL = {
    "DROP": "drop", "FDA": "fda", "NQ": "nq", "SQuAD": "squad", "SWDE": "swde", "TriviaQA": "triviaqa",
    "average": "average",
}  # fmt: skip
COMPONENTS = {"pca-adversarial": "k", "pca": "k", "grad": "kq"}  # methods and their scores
# where the page treats a table or figure: its section, by the label
SECTIONS = {
    "fig:one": "", "fig:histograms-main": "figures", "fig:rank-util-curve": "figures", "fig:histogram": "figures",
    "fig:histogram_pre_vs_post": "figures", "fig:filters_dn": "figures", "fig:filters_dn2": "figures",
    "tab:full_results_gdn_13B_paper": "after fine-tuning", "tab:pre_rft_50_gated_only": "before fine-tuning",
    "tab:mixer_scaling": "speed", "tab:shared-non-shared-comp-full": "convolutions",
    "table:adv_vs_non_adv": "convolutions", "tab:ablation_kq_targets": "keys, queries, or both",
    "tab:speedup_whole_model": "speed", "tab:unified_summary_50": "before fine-tuning",
}  # fmt: skip
PAPER = record("paper")


def _names(pattern: str) -> list[str]:
    return sorted(path.stem for path in RECORDS.glob(f"{pattern}.json"))


def _links(names: list[str]) -> str:
    return ", ".join(f"[{name}](records/{name}.json)" for name in names)


# --- the paper ---


def _overview() -> str:
    """Return a line for each table and figure of the paper: its place, its section here and its recipes."""
    recipes: dict[str, list[str]] = {}
    for path in sorted((DOCS.parent / "recipes").glob("*.toml")):
        for label in Recipe.read(path).reproduces:
            recipes.setdefault(label, []).append(f"`{path.stem}`")

    def places(value: Any) -> Iterator[tuple[int, str, str]]:
        if isinstance(value, dict) and "lines" in value:
            yield int(value["lines"][1:].split("-")[0]), value["label"], value["lines"]
        elif isinstance(value, dict):
            for part in value.values():
                yield from places(part)

    tables = [place[1:] for place in sorted(places(PAPER))]
    figures = [(figure["label"], figure["lines"]) for figure in PAPER["figures"]]
    lines = []
    for title, labels in (("Table", tables), ("Figure", figures)):
        for number, (label, where) in enumerate(labels, 1):
            name = "after fine-tuning" if "tab:zs" in label else "recall" if "tab:recall" in label else SECTIONS[label]
            anchor = name.replace(",", "").replace(" ", "-")
            section = f"[{name}](#{anchor})" if name else "a drawing of the idea"
            lines.append([f"{title} {number}", f"`{label}`", where, section, ", ".join(recipes.get(label, []))])
    return markdown(["", "label", "lines", "here", "recipe"], lines)


def _paired(number: float, uncut: float, digits: int) -> str:
    """Return a perplexity and, in brackets, how many times that of the uncut model it is."""
    ratio = number / uncut
    digits = digits if ratio < 10 else 1 if ratio < 100 else 0
    return f"{large(number)} ({ratio:,.{digits}f})"


def _paper_grid(section: str, when: str, column: str, *, ratio: bool = False) -> str:
    """Return a column of the large tables by model, share removed and method."""
    rows, place = PAPER[section], PAPER[section]["columns"].index(column)
    uncut = {title: rows[model]["uncut"][place] for title, model in PAPER_MODELS.items()}

    def cell(title: str, base: str, removed: str, method: str) -> str:
        number = rows[PAPER_MODELS[title]][when][method][removed][place]
        return _paired(number, uncut[title], 2) if ratio else large(number)

    places = [(title, large(base), removed) for title, base in uncut.items() for removed in REMOVED]
    return grid(("model", "uncut", "removed, %"), places, METHODS, cell)


def _headline() -> str:
    rows, titles = PAPER["headline"], ["WikiText", "LAMBADA", "zero-shot average", "recall average"]
    lines = [["uncut", "", *map(str, rows["uncut"])]]
    for removed in reversed(REMOVED):
        lines += [[removed, method, *map(str, by_share[removed])] for method, by_share in rows["after"].items()]
    return markdown(["removed, %", "method", *titles], lines)


def _tasks() -> str:
    """Return accuracies by task at 50 %, of the two methods that the paper recommends."""
    rows = PAPER["zero_shot"]
    lines = []
    for title, model in PAPER_MODELS.items():
        kinds = {("uncut", ""): rows[model]["uncut"]}
        kinds |= {
            (method, when): rows[model][when][method]["50"] for method in METHODS[3:] for when in ("before", "after")
        }
        for (method, when), values in kinds.items():
            named = dict(zip(rows["columns"], values, strict=True))
            lines.append([title, method, when, *(f"{named[task]:.1f}" for task in TASKS.values())])
    return markdown(["model", "cut by", "fine-tuning", *TASKS], lines)


def _recall() -> str:
    rows = PAPER["recall"]
    lines = []
    for title, model in PAPER_MODELS.items():
        kinds = {"uncut": rows[model]["uncut"]} | {name: rows[model]["after"][name]["50"] for name in METHODS}
        for method, values in kinds.items():
            named = dict(zip(rows["columns"], values, strict=True))
            lines.append([title, method, *(f"{named[task]:.1f}" for task in RECALL.values())])
    return markdown(["model", "cut by", *RECALL], lines)


def _paper_score(title: str, score: str, method: str) -> str:
    rows, model = PAPER["word_perplexity_by_score"], PAPER_MODELS[title]
    return _paired(rows["cut"][method][model][score], rows["uncut"][model], 2)


def _paper_components(filters: str, removed: str, method: str) -> str:
    rows = PAPER["principal_components"]
    return _paired(rows[filters][method][removed], rows["uncut"][filters], 2)


def _paper_filters() -> str:
    rows = PAPER["shared_filters"]
    titles = {"own": "one for each channel", "head": "one for each head", "all": "one for all heads"}
    return markdown(["filters", *rows["columns"]], [[titles[key], *map(str, row)] for key, row in rows["rows"].items()])


# --- ours ---


KINDS = ("main", "kept", "scores", "scores-kept", "rotations")
SWEEP_NAMES = [f"sweep-{model}-{kind}" for model, kind in product(MODELS.values(), KINDS)]
EPSILONS = {"as published": True, "corrected": False}
TOKENS = ("end", "none", "before")  # where a special token is put


def _word_perplexities(name: str) -> dict[tuple[bool, str, str, int], float]:
    """Return the word perplexities of a model's cuts by epsilon, method, score and key dim."""
    sweeps = [record(each) for each in SWEEP_NAMES if each.startswith(f"sweep-{name}")]
    return {
        (sweep["settings"]["keep_norm_eps"], row["method"], row["score"], row["key_dim"]): row["word_perplexity"]
        for sweep in sweeps
        for row in sweep["rows"]
    }


CUTS = {title: _word_perplexities(name) for title, name in MODELS.items()}
UNCUT = {title: record(f"sweep-{name}-main")["uncut"]["word_perplexity"] for title, name in MODELS.items()}


def _our_cut(title: str, epsilon: str, method: str, score: str, key_dim: int) -> str:
    number = CUTS[title].get((EPSILONS[epsilon], method, score, key_dim))
    return "" if number is None else _paired(number, UNCUT[title], 3)


def _our_methods() -> str:
    text = grid(
        ("model", "uncut", "key dim", "norm_eps"),
        [(title, large(UNCUT[title]), *place) for title in MODELS for place in product((89, 76, 64, 32), EPSILONS)],
        METHODS,
        lambda title, _, key_dim, epsilon, method: _our_cut(title, epsilon, method, "kq", key_dim),
    )
    return f"{text}\n\nRecords: {_links(SWEEP_NAMES)}.{_order()}"


def _order() -> str:
    """Return in how many of our cuts the order of methods is that of the paper."""
    cuts = [
        {method: CUTS[title][kept, method, "kq", key_dim] for method in METHODS}
        for title, kept, key_dim in product(MODELS, EPSILONS.values(), (89, 76, 64, 32))
    ]
    best = sum(min(cut, key=cut.__getitem__) in ("grad", "drrqr") for cut in cuts)
    ahead = {name: sum(cut[name] < cut["random"] for cut in cuts) for name in ("l1", "s-wanda")}
    return (
        f" `grad` or `drrqr` loses least in {best} of {len(cuts)} lines; `l1` is ahead of `random` in {ahead['l1']},"
        f" `s-wanda` in {ahead['s-wanda']}."
    )


def _released_choice(title: str, key_dim: int) -> float:
    """Return the word perplexity of a cut by `drrqr` as the released code chooses channels."""
    perplexity: float = only(record(f"sweep-{MODELS[title]}-released")["rows"], key_dim=key_dim)["word_perplexity"]
    return perplexity


def _special_tokens(title: str, key_dim: int, method: str, tokens: str) -> tuple[float, float]:
    """Return the word perplexity of a cut and of the uncut model."""
    sweep = record("special-tokens")[f"{MODELS[title]} {tokens}"]
    row = only(sweep["rows"], key_dim=key_dim, method=method)
    return row["word_perplexity"], sweep["uncut"]["word_perplexity"]


def _largest_difference_of_special_tokens() -> float:
    """Return the largest difference that special tokens make to the ratio of a cut to the uncut model."""
    ratios = [
        [cut / uncut for cut, uncut in (_special_tokens(*place, tokens) for tokens in TOKENS)]
        for place in product(MODELS, (64, 32), ("grad", "drrqr"))
    ]
    return max(max(row) - min(row) for row in ratios)


def _preset() -> str:
    """Return recoveries with the paper's settings: word perplexities and shares of the gap that closed."""
    rows = [
        {
            "model": title,
            "closed": percent((words["before"] - words["after"]) / (words["before"] - words["uncut"])),
            **{name: _paired(number, words["uncut"], 3) for name, number in words.items()},
        }
        for title, name in MODELS.items()
        for words in [record("preset-paper")[name]["measured"]["word_perplexity"]]
    ]  # fmt: skip
    columns = {
        "model": "{model}", "uncut": "{uncut}", "cut": "{before}", "fine-tuned": "{after}",
        "uncut, same training": "{control}", "gap to uncut closed": "{closed}",
    }  # fmt: skip
    return f"{table(columns, rows)}\n\nRecord: {_links(['preset-paper'])}."


def _bundled_recovery(key_dim: int, measure: str, when: str, method: str) -> str:
    """Return the word perplexity or the recall of a cut of the bundled model, before or after its fine-tuning."""
    values = only(RECOVERED["rows"], method=method, key_dim=key_dim)[measure.replace(" ", "_")]
    return percent(values[when]) if measure == "recall" else _paired(values[when], values["uncut"], 2)


def _optimizer() -> str:
    """Return the cuts of a DeltaNet that was trained with the released optimizer settings."""
    sweeps = record("released-optimizer")

    def cell(epsilon: str, key_dim: int, method: str) -> str:
        row = only(sweeps[epsilon]["rows"], method=method, key_dim=key_dim)
        return _paired(row["word_perplexity"], sweeps[epsilon]["uncut"]["word_perplexity"], 3)

    places = [(epsilon, key_dim) for key_dim in (89, 76, 64, 32) for epsilon in EPSILONS]
    return grid(("norm_eps", "key dim"), places, METHODS, cell)


def _layers() -> list[dict[str, Any]]:
    rows = []
    for title, model in {"DeltaNet": "delta_net", "Gated DeltaNet": "gated_deltanet"}.items():
        ours = timings("bench-mixer-no-gate", model=model, mode="forward")
        for key_dim, paper in PAPER["mixers"]["rows"][model].items():
            row = ours[int(key_dim)]
            rows.append({"layer": title, **row, "paper": paper, "millions": row["tokens_per_second"] / 1e6})
    return rows


def _whole(names: list[str], models: Mapping[str, str], mode: str) -> list[dict[str, Any]]:
    """Return the rows of whole models, the paper's beside ours."""
    paper, speeds = PAPER["speedup"]["compression"], PAPER["speedup"]["thousand_tokens_per_second"]
    rows = []
    for title, model in models.items():
        width = 128 if model.startswith("delta_net") else 256
        measured = [timings(name, model=model, mode=mode) for name in names]
        for removed, by_model in paper.items():
            key_dim = round(width * (1 - float(removed) / 100))
            row = next((rows_of[key_dim] for rows_of in measured if key_dim in rows_of), {})
            ours = {"ours": row["speedup"], "thousands": row["tokens_per_second"] / 1000} if row else {}
            rows.append(
                {"title": title, "removed": removed, "paper": by_model[model], "speed": speeds[removed][model], **ours}
            )
    return rows


SHORT = _names("bench-model-2048*")
WHOLE = {
    "model": "{title}",
    "removed, %": "{removed}",
    "the paper: 1,000 tokens/s": "{speed:.1f}",
    "speedup": "{paper:.2f}x",
    "ours: 1,000 tokens/s": "{thousands:.1f}",
    "our speedup": "{ours:.2f}x",
}
ALL_TIMED = {**PAPER_MODELS, **TIMED}


def _whole_2048() -> str:
    """Return the whole models of the paper beside those of ours that were timed over 32 x 2048 tokens."""
    return f"{table(WHOLE, _whole(SHORT, ALL_TIMED, 'forward'))}\n\nRecords: {_links(SHORT)}."


def _largest_difference_of_speedups() -> float:
    """Return the largest difference of a speedup of a prefill from the paper's, over its four models."""
    rows = _whole(_names("bench-model-[dg]*"), PAPER_MODELS, "prefill")
    return max(abs(row["ours"] - row["paper"]) for row in rows if "ours" in row)


def _below_uncut(method: str, removed: str) -> int:
    """Return on how many models of the paper a cut has a lower WikiText perplexity after fine-tuning than uncut."""
    rows, place = PAPER["zero_shot"], PAPER["zero_shot"]["columns"].index("wikitext")
    numbers = [rows[model] for model in PAPER_MODELS.values()]
    return sum(each["after"][method][removed][place] < each["uncut"][place] for each in numbers)


FIGURES = record("figures")["models"]
CUT = ("uncut", *METHODS, "drrqr-corrected")


def _utilisation() -> str:
    lines = [
        [title, str(time), *(f"{FIGURES[title]['utilisation'][name][place]:.3f}" for name in CUT)]
        for title in FIGURES
        for place, time in enumerate(FIGURES[title]["times"])
    ]
    return markdown(["model", "token", *CUT], lines)


def _spectra() -> str:
    lines = []
    for title, measured in FIGURES.items():
        for name, orders in measured["spectrum"].items():
            lines.append([title, name, f"{orders['middle']:.2f}", f"{orders['smallest']:.2f}"])
    return markdown(["model", "cut by", "largest to middle", "largest to smallest"], lines)


def _fine_tuned() -> str:
    lines = [
        [title, name, f"{orders['middle']:.2f}", f"{orders['smallest']:.2f}"]
        for title, measured in FIGURES.items()
        for name, orders in measured.get("fine_tuned", {}).items()
    ]
    return markdown(["model", "", "largest to middle", "largest to smallest"], lines)


def _likeness() -> str:
    lines = [
        [title, *(f"{measured['likeness'][role]:.2f}" for role in ("query", "key", "value"))]
        for title, measured in FIGURES.items()
        if "likeness" in measured
    ]
    return markdown(["model", "queries", "keys", "values"], lines)


def _suspicious() -> str:
    return table(
        {"label": "`{label}`", "line": "{line}", "what": "{entry}", "printed": "{printed}", "why": "{why}"},
        PAPER["suspicious"],
    )


TABLES = {
    "beside-overview": _overview(),
    "beside-before-wikitext": _paper_grid("zero_shot", "before", "wikitext", ratio=True),
    "beside-before-lambada": _paper_grid("zero_shot", "before", "lambada_perplexity"),
    "beside-before-average": _paper_grid("zero_shot", "before", "average"),
    "beside-our-methods": _our_methods(),
    "beside-released-choice": grid(
        ("model", "key dim"),
        product(MODELS, (89, 76, 64, 32)),
        ("all tokens", "5,000 rows, 20 swaps"),
        lambda title, key_dim, choice: (
            _our_cut(title, "as published", "drrqr", "kq", key_dim)
            if choice == "all tokens"
            else _paired(_released_choice(title, key_dim), UNCUT[title], 3)
        ),
    ),
    "beside-special-tokens": grid(
        ("model", "key dim"),
        product(MODELS, (64, 32)),
        product(("grad", "drrqr"), TOKENS),
        lambda title, key_dim, place: _paired(*_special_tokens(title, key_dim, *place), 3),
    ),
    "beside-optimizer": _optimizer(),
    "beside-headline": _headline(),
    "beside-after-wikitext": _paper_grid("zero_shot", "after", "wikitext", ratio=True),
    "beside-after-lambada": _paper_grid("zero_shot", "after", "lambada_perplexity"),
    "beside-after-average": _paper_grid("zero_shot", "after", "average"),
    "beside-tasks": _tasks(),
    "beside-recovered": grid(
        ("key dim", "measure", ""),
        product(
            sorted({row["key_dim"] for row in RECOVERED["rows"]}, reverse=True),
            ("word perplexity", "recall"),
            ("before", "after"),
        ),
        METHODS,
        _bundled_recovery,
    ),
    "beside-preset": _preset(),
    "beside-recall-average": _paper_grid("recall", "after", "average"),
    "beside-recall": _recall(),
    "beside-scores": grid(("model", "score"), pairs(dict.fromkeys(PAPER_MODELS, SCORES)), METHODS[1:], _paper_score),
    "beside-our-scores": grid(
        ("model", "norm_eps", "score"),
        product(MODELS, EPSILONS, SCORES),
        METHODS[1:],
        lambda title, epsilon, score, method: _our_cut(title, epsilon, method, score, 64),
    ),
    "beside-filters": _paper_filters(),
    "beside-components": grid(
        ("filters", "removed, %"),
        pairs(dict.fromkeys(("own", "shared"), ("50", "75"))),
        COMPONENTS,
        _paper_components,
    ),
    "beside-our-components": grid(
        ("model", "key dim"),
        product(MODELS, (64, 32)),
        COMPONENTS,
        lambda title, key_dim, method: _our_cut(title, "corrected", method, COMPONENTS[method], key_dim),
    ),
    "beside-layers": table(
        {
            "layer": "{layer}",
            "key dim": "{key_dim}",
            "the paper: tokens/s": "{paper[tokens_per_second]}",
            "speedup": "{paper[speedup]:.2f}x",
            "GiB": "{paper[gib]:.2f}",
            "ratio": "{paper[memory_ratio]:.2f}",
            "ours: tokens/s": "{millions:.1f}M",
            "our speedup": "{speedup:.2f}x",
            "our GiB": "{gib:.2f}",
            "our ratio": "{memory_ratio:.2f}",
        },
        _layers(),
    ),
    "beside-models": _whole_2048(),
    "beside-utilisation": _utilisation(),
    "beside-spectra": _spectra(),
    "beside-fine-tuned": _fine_tuned(),
    "beside-likeness": _likeness(),
    "beside-suspicious": _suspicious(),
}
RELEASED = [
    abs(_released_choice(title, key_dim) - CUTS[title][True, "drrqr", "kq", key_dim]) / UNCUT[title]
    for title, key_dim in product(MODELS, (89, 76, 64, 32))
]
NUMBERS = {
    "beside-bundled-uncut": f"{RECOVERED['control']['word_perplexity']['before']:.1f}",
    "beside-bundled-control": f"{RECOVERED['control']['word_perplexity']['after']:.1f}",
    "released-difference": f"{max(RELEASED):.3f}",
    "special-tokens-difference": f"{_largest_difference_of_special_tokens():.3f}",
    "decayed-uncut": large(record("released-optimizer")["corrected"]["uncut"]["word_perplexity"]),
    "delta-uncut": large(UNCUT["DeltaNet 30M"]),
    "decayed-steps": f"{record('released-optimizer')['training']['config']['steps']:,}",
    "beside-below": str(_below_uncut("drrqr", "50")),
    "beside-prefill": f"{_largest_difference_of_speedups():.2f}",
    "likeness-largest": f"{max(max(model['likeness_largest'].values()) for model in FIGURES.values()):.2f}",
}
