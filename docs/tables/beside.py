"""BESIDE_THE_PAPER.md: the paper's tables and figures, what reproduces them, and what our small models give.

Some of our records are still to be measured. Their tables say so until the record is there:

- `sweep-MODEL*lm-eval.json`: sweeps with lm-eval's `wikitext`, of the names in `MODELS`;
- `bench-model-2048*.json`: `bench model` over 32 x 2048 tokens;
- `preset-paper.json`: recoveries with `--preset paper`, and evaluations of them by lm-eval;
- `released-optimizer.json`: a DeltaNet trained as the released code trains it, and its sweep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slimstate.workflows.run import Recipe
from tables.layout import (
    DOCS,
    METHODS,
    MODELS,
    PAPER_MODELS,
    RECORDS,
    Row,
    grid,
    large,
    markdown,
    pairs,
    record,
    table,
    timings,
    word_perplexity,
)
from tables.recovery import closed

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


def _records(name: str, kind: str) -> list[Row]:
    """Return all records of a kind inside a record of the docs, wherever they are in it; none if it does not exist."""

    def walk(value: Any) -> Iterator[Row]:
        if isinstance(value, dict) and value.get("kind") == kind:
            yield value
        elif isinstance(value, (dict, list)):
            for part in value.values() if isinstance(value, dict) else value:
                yield from walk(part)

    return list(walk(record(name))) if (RECORDS / f"{name}.json").is_file() else []


def _names(pattern: str) -> list[str]:
    return sorted(path.stem for path in RECORDS.glob(f"{pattern}.json"))


def _links(names: list[str]) -> str:
    return ", ".join(f"[{name}](records/{name}.json)" for name in names)


def _missing(what: str, command: str) -> str:
    return f"*Not measured yet: {what}.* The command: `{command}`."


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


class WordSweeps:
    """Sweeps of a model in lm-eval's unit: the uncut model, and cuts by epsilon, method, score and key dim."""

    def __init__(self, sweeps: list[Row]) -> None:
        self.uncut: float | None = None
        self.cuts: dict[tuple[bool, str, str, int], float] = {}
        for sweep in sweeps:
            self.uncut = self.uncut or word_perplexity(sweep["uncut"])
            for row in sweep["rows"]:
                if (number := word_perplexity(row)) is not None:
                    place = (sweep["settings"]["keep_norm_eps"], row["method"], row["score"], row["key_dim"])
                    self.cuts[place] = number

    def cell(self, kept: bool, method: str, score: str, key_dim: int) -> str:
        number = self.cuts.get((kept, method, score, key_dim))
        return "" if number is None or self.uncut is None else _paired(number, self.uncut, 3)


SWEEP_NAMES = [name for model in MODELS.values() for name in _names(f"sweep-{model}*lm-eval")]
SWEEPS = {
    title: WordSweeps([record(name) for name in SWEEP_NAMES if name.startswith(f"sweep-{model}")])
    for title, model in MODELS.items()
}
EPSILONS = {"as published": True, "corrected": False}
SWEEP_COMMAND = "slimstate sweep MODEL … --text wiki.test.raw --key-dims 89,76,64,32 [--keep-norm-eps]"


def _measured(missing: str, titles: tuple[str, ...], places: list[tuple[Any, ...]], columns: Any, cell: Any) -> str:
    """Return a table of our sweeps with the lines that were measured, and a sentence where there is none."""
    places = [place for place in places if any(cell(*place, column) for column in columns)]
    return grid(titles, places, columns, cell) if places else missing


def _uncut(title: str) -> str:
    uncut = SWEEPS[title].uncut
    return "" if uncut is None else large(uncut)


def _our_methods() -> str:
    dims = {title: sorted({place[3] for place in sweeps.cuts}, reverse=True) for title, sweeps in SWEEPS.items()}
    text = _measured(
        _missing("sweeps of the two 30M models with lm-eval's `wikitext`", SWEEP_COMMAND),
        ("model", "uncut", "key dim", "norm_eps"),
        [(title, _uncut(title), dim, epsilon) for title, dim in pairs(dims) for epsilon in EPSILONS],
        METHODS,
        lambda title, _, dim, epsilon, method: SWEEPS[title].cell(EPSILONS[epsilon], method, "kq", dim),
    )
    return f"{text}\n\nRecords: {_links(SWEEP_NAMES)}.{_order()}" if SWEEP_NAMES else text


def _order() -> str:
    """Return in how many of our cuts the order of methods is that of the paper; nothing before they are measured."""
    cuts = [
        {method: sweeps.cuts.get((kept, method, "kq", dim)) for method in METHODS}
        for sweeps in SWEEPS.values()
        for kept, dim in sorted({(place[0], place[3]) for place in sweeps.cuts})
    ]
    cuts = [cut for cut in cuts if None not in cut.values()]
    if not cuts:
        return ""
    best = sum(min(cut, key=cut.__getitem__) in ("grad", "drrqr") for cut in cuts)
    ahead = {name: sum(cut[name] < cut["random"] for cut in cuts) for name in ("l1", "s-wanda")}
    return (
        f" `grad` or `drrqr` loses least in {best} of {len(cuts)} lines; `l1` is ahead of `random` in {ahead['l1']},"
        f" `s-wanda` in {ahead['s-wanda']}."
    )


def _places(score: str, methods: Sequence[str]) -> list[tuple[str, str]]:
    """Return the models and epsilons with which one of the methods was measured by a score."""
    return [
        (title, epsilon)
        for title, sweeps in SWEEPS.items()
        for epsilon, kept in EPSILONS.items()
        if any(place[0] == kept and place[1] in methods and place[2] == score for place in sweeps.cuts)
    ]


def _our_scores() -> str:
    where = "[Experiments](EXPERIMENTS.md#keys-queries-or-both) has them per token"
    command = "slimstate sweep MODEL … --text wiki.test.raw --compressions 0.5 --scores kq,k,q"
    return _measured(
        _missing(f"the scores in lm-eval's unit; {where}", command),
        ("model", "norm_eps", "score"),
        [(*place, score) for place in _places("k", METHODS[1:]) for score in SCORES],
        METHODS[1:],
        lambda title, epsilon, score, method: SWEEPS[title].cell(EPSILONS[epsilon], method, score, 64),
    )


def _our_components() -> str:
    where = "[Experiments](EXPERIMENTS.md#principal-components) has them in others"
    command = "slimstate sweep MODEL … --text wiki.test.raw --methods pca,pca-adversarial,grad --scores kq,k"
    return _measured(
        _missing(f"principal components in lm-eval's unit; {where}", command),
        ("model", "norm_eps", "key dim"),
        [(*place, dim) for place in _places("k", ("pca",)) for dim in (64, 32)],
        COMPONENTS,
        lambda title, epsilon, dim, method: SWEEPS[title].cell(EPSILONS[epsilon], method, COMPONENTS[method], dim),
    )


def _preset() -> str:
    """Return recoveries with the paper's settings: nats per token, and lm-eval's word perplexity where measured."""
    runs = _records("preset-paper", "recovery")
    if not runs:
        command = "slimstate recover CUT --teacher MODEL --data TEXT --preset paper --control --eval-text WIKITEXT"
        return _missing("`--preset paper` on the two 30M models", f"{command} --out DIR")
    words = {result["name"]: word_perplexity(result) for result in _records("preset-paper", "evaluation")}
    titles = {"delta_net": "DeltaNet 30M", "gated_deltanet": "Gated 31M"}
    rows = []
    for run in runs:
        nats, cut = run["measured"]["nats"], run["cut"] or {}
        row = {"model": titles.get(run["model_type"], run["model_type"]), "key_dim": run["key_dim"], **nats}
        row |= {"method": cut.get("method", "uncut"), "words": words.get(run["name"])}
        for name in ("uncut", "control"):
            if nats.get(name) is not None:
                row[f"closed_{name}"] = closed(nats["before"], nats["after"], nats[name], 0)
        rows.append(row)
    columns = {
        "model": "{model}", "cut by": "{method}", "key dim": "{key_dim}", "uncut": "{uncut:.4f}",
        "cut": "{before:.4f}", "fine-tuned": "{after:.4f}", "control": "{control:.4f}",
        "gap to the uncut model closed": "{closed_uncut}", "gap to the control closed": "{closed_control}",
        "fine-tuned, lm-eval's word perplexity": "{words:.1f}",
    }  # fmt: skip
    return f"{_known(columns, rows)}\n\nNats per token. Record: {_links(['preset-paper'])}."


def _known(columns: Mapping[str, str], rows: list[Row]) -> str:
    """Return a table of the columns that at least one row has."""

    def has(template: str, row: Row) -> bool:
        try:
            return bool(template.format_map(row))
        except (KeyError, TypeError):
            return False

    return table({title: text for title, text in columns.items() if any(has(text, row) for row in rows)}, rows)


def _optimizer() -> str:
    """Return the cuts of a DeltaNet that was trained with the released optimizer settings."""
    sweeps = _records("released-optimizer", "sweep")
    if not sweeps:
        command = "slimstate train delta_net-30m --data TEXT --weight-decay 0.1 --adam-eps 1e-15 --out MODEL"
        return _missing("a DeltaNet 30M trained with the optimizer settings of the released code", command)
    lines, unit = [], "per token"
    for sweep in sweeps:
        uncut, rows = sweep["uncut"], {}
        if word_perplexity(uncut) is not None:
            unit = "in lm-eval's unit"
        for row in sweep["rows"]:
            per_word = word_perplexity(uncut) is not None
            number, base = (word_perplexity(each) if per_word else each["perplexity"] for each in (row, uncut))
            if row["score"] == "kq" or row["method"] == "random":
                rows[row["method"], row["key_dim"]] = "" if number is None else _paired(number, base, 3)
        epsilon = "as published" if sweep["settings"]["keep_norm_eps"] else "corrected"
        for dim in sorted({dim for _, dim in rows}, reverse=True):
            lines.append([epsilon, str(dim), *(rows.get((method, dim), "") for method in METHODS)])
    text = markdown(["norm_eps", "key dim", *METHODS], lines)
    return f"{text}\n\nPerplexity {unit}. Record: {_links(['released-optimizer'])}."


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
    if not SHORT:
        command = "slimstate run throughput"
        return _missing("whole models over 32 x 2048 tokens, which the released script runs", command)
    return f"{_known(WHOLE, _whole(SHORT, ALL_TIMED, 'forward'))}\n\nRecords: {_links(SHORT)}."


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
    if not lines:
        return _missing("the spectra of a cut before and after fine-tuning", "slimstate run spectra --small")
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
    "beside-optimizer": _optimizer(),
    "beside-headline": _headline(),
    "beside-after-wikitext": _paper_grid("zero_shot", "after", "wikitext", ratio=True),
    "beside-after-lambada": _paper_grid("zero_shot", "after", "lambada_perplexity"),
    "beside-after-average": _paper_grid("zero_shot", "after", "average"),
    "beside-tasks": _tasks(),
    "beside-preset": _preset(),
    "beside-recall-average": _paper_grid("recall", "after", "average"),
    "beside-recall": _recall(),
    "beside-scores": grid(("model", "score"), pairs(dict.fromkeys(PAPER_MODELS, SCORES)), METHODS[1:], _paper_score),
    "beside-our-scores": _our_scores(),
    "beside-filters": _paper_filters(),
    "beside-components": grid(
        ("filters", "removed, %"),
        pairs(dict.fromkeys(("own", "shared"), ("50", "75"))),
        COMPONENTS,
        _paper_components,
    ),
    "beside-our-components": _our_components(),
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
    "beside-models-4096": table(WHOLE, _whole(["bench-model-delta", "bench-model-gated"], PAPER_MODELS, "prefill")),
    "beside-utilisation": _utilisation(),
    "beside-spectra": _spectra(),
    "beside-fine-tuned": _fine_tuned(),
    "beside-likeness": _likeness(),
    "beside-suspicious": _suspicious(),
}
