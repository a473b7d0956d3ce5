"""Numbers on the pages about models are those of the records they name, and what is said of their order is so."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable

import pytest

from places import ROOT
from reading_pages import (
    PAGES,
    RECORDS,
    Ratios,
    check_cells,
    check_rows,
    check_says,
    found,
    ratios,
    record,
    table_after,
)
from slimstate.records.benchmark import KernelRecord
from slimstate.records.sweep import SweepRecord

METHODS = ["random", "l1", "s-wanda", "grad", "drrqr"]
EXPERIMENTS, PUBLISHED = "EXPERIMENTS.md", "AS_PUBLISHED.md"
SIZES = {"DeltaNet 30M": "delta_net-30m", "Gated 31M": "gated_deltanet-31m"}
PAPER = {
    "DeltaNet 370M": "delta_net-370m", "DeltaNet 1.3B": "delta_net-1.3b",
    "Gated 370M": "gated_deltanet-370m", "Gated 1.3B": "gated_deltanet-1.3b",
}  # fmt: skip
CUTS = (89, 76, 64, 32, 16)
CURVES = ROOT / "src" / "slimstate" / "serving" / "curves"


def sweeps(size: str, *kinds: str):
    """Those of one of the 30M models; of the bundled model there is one."""
    return [record(f"sweep-{SIZES[size]}-{kind}" if size in SIZES else size) for kind in kinds]


def nats(size: str, *kinds: str) -> dict[tuple[str, int], float]:
    return {
        (row["method"], row["key_dim"]): row["nats_per_token"] for one in sweeps(size, *kinds) for row in one["rows"]
    }


def published(size: str) -> Ratios:
    return ratios(*sweeps(size, "kept"))


def corrected(size: str) -> Ratios:
    return ratios(*sweeps(size, "main", "exact"))


def paper_ratio(model: str, method: str, compression: str) -> float:
    table = record("paper")["word_perplexity"][PAPER[model]]
    return table["cut"][method][compression] / table["uncut"]


def rounded(ratio: float) -> str:
    """As the paper's ratios are written here: two places, or none from ten on."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


def several(number: float) -> str:
    """One place, or none from a thousand on."""
    return f"{number:.1f}" if number < 500 else f"{number:,.0f}"


def test_every_record_that_a_page_names_is_there_and_every_record_is_named():
    named = {name for page in PAGES.values() for name in re.findall(r"records/([\w.-]+\.json)", page)}
    there = {path.name for path in RECORDS.glob("*.json")}
    assert named <= there
    assert there - named <= {"exactness.json"}  # a page is made from it, which names it in another way


@pytest.mark.parametrize(
    "path", sorted(set(RECORDS.glob("sweep-*.json")) - set(RECORDS.glob("*-dtypes.json"))), ids=lambda path: path.stem
)
def test_sweeps_of_one_model_are_of_the_same_text_and_told_per_word(path):
    read, main = SweepRecord.read(path), SweepRecord.read(RECORDS / f"{path.stem.rsplit('-', 1)[0]}-main.json")
    assert read.settings.text == main.settings.text
    assert read.uncut == main.uncut
    assert all(row.word_perplexity for row in read.rows)


def shape(name: str) -> list[int]:
    """Layers, heads, key width and value dim of a shape that comes with slimstate, of DeltaNet or Gated DeltaNet."""
    config = json.loads((ROOT / f"src/slimstate/models/configs/{name}.json").read_text(encoding="utf-8"))
    heads, width = config["num_heads"], config.get("head_dim")
    key_dim = width or int(config["hidden_size"] * config["expand_k"]) // heads
    value_dim = int((width or config["hidden_size"] / heads) * config["expand_v"])
    return [config["num_hidden_layers"], heads, key_dim, value_dim]


def test_the_models_are_the_shapes_and_trainings_of_the_records():
    table = {title: cells for title, *cells in table_after(EXPERIMENTS, "## The models")[1:]}
    shapes = {"DeltaNet 30M": "delta_net-30m", "Gated DeltaNet 31M": "gated_deltanet-31m", "bundled": "delta_net-5m"}
    for title, name in {**shapes, "own, head, all": "delta_net-5m"}.items():
        assert table[title][1] == ", ".join(map(str, shape(name)))
    trained = {"own, head, all": record("shared-filters")["own"], **record("hybrids")}
    for title, name in (("own, head, all", "own, head, all"), ("hybrid", "qwen3_next"), ("Mamba-2", "mamba2")):
        training = trained[name]["training"]
        assert table[title][0] == f"{training['parameters'] / 1e6:.1f}M"
        corpus = training["corpus"]["windows"] * training["corpus"]["length"]
        assert table[title][2].startswith(f"{corpus / 1e6:.0f}M tokens")
    assert f"read {trained['own, head, all']['training']['epochs']:.1f} times" in table["own, head, all"][2]


# the norm epsilon


@pytest.mark.parametrize(
    ("words", "size"), [("Gated DeltaNet 31M, uncut", "Gated 31M"), ("DeltaNet 30M, uncut", "DeltaNet 30M")]
)
def test_both_columns_of_the_norm_epsilon_are_those_of_the_sweeps(words, size):
    kinds = {"corrected": corrected(size), "as published": published(size)}
    at = f"\n{words}"
    check_cells(PUBLISHED, at, METHODS, lambda row, key_dim, kind: f"{kinds[kind][row, 'kq', int(key_dim)]:.3f}")
    uncut = sweeps(size, "main")[0]["uncut"]
    check_says(PUBLISHED, f"{words} {uncut['word_perplexity']:.1f} per word ({uncut['perplexity']:.2f} per token)")
    check_says(PUBLISHED, f"({uncut['tokens']:,} tokens in windows of 1024; {uncut['words']:,} words)")


def test_what_the_epsilon_costs_is_what_the_sweeps_differ_by():
    cost = {}
    for size in SIZES:
        left, made_up = nats(size, "kept"), nats(size, "main", "exact")
        cost[size] = {key: left[key] - made_up[key] for key in left}
    words = "What leaving the epsilon alone costs"
    check_cells(PUBLISHED, words, METHODS, lambda row, size, title: f"{cost[size][row, int(title)]:.3f}")
    delta_net, gated = cost.values()
    for method in METHODS:
        for wide, narrow in itertools.pairwise(CUTS):
            assert gated[method, wide] < gated[method, narrow]
            assert delta_net[method, wide] < delta_net[method, narrow] or (method, narrow) == ("random", 16)
        assert method == "random" or all(delta_net[method, width] < gated[method, width] for width in CUTS)
    least = max(abs(delta_net[method, 89]) for method in ("grad", "drrqr"))
    check_says(PUBLISHED, f"at 89 the difference is under {math.ceil(1000 * least) / 1000:.3f}.")
    for each in cost.values():
        assert all(max(METHODS, key=lambda method: each[method, width]) == "random" for width in CUTS[:-1])


def test_the_epsilon_changes_the_order_of_methods_as_the_page_says():
    made_up, left = ({size: kind(size) for size in SIZES} for kind in (corrected, published))
    gated, delta_net = "Gated 31M", "DeltaNet 30M"
    for other in ("l1", "s-wanda"):
        assert made_up[gated]["grad", "kq", 16] < made_up[gated][other, "kq", 16]
        assert left[gated]["grad", "kq", 16] > left[gated][other, "kq", 16]
    assert made_up[delta_net]["grad", "kq", 32] < made_up[delta_net]["drrqr", "kq", 32]
    assert left[delta_net]["grad", "kq", 32] > left[delta_net]["drrqr", "kq", 32]
    for kind in (made_up, left):
        assert all(
            kind[size]["l1", "kq", width] < kind[size]["random", "kq", width] for size in SIZES for width in CUTS
        )


# five methods, before recovery


def test_five_methods_per_word_are_those_of_the_sweeps():
    def cell(method: str, size: str, title: str) -> str:
        return f"{ratios(*sweeps(size, 'main', 'exact'))[method, 'kq', int(title)]:.3f}"

    check_cells(EXPERIMENTS, "Per word, at the paper's key dims", METHODS, cell)


def test_five_methods_per_token_are_those_of_the_sweeps():
    def cell(method: str, size: str, title: str) -> str:
        return f"{ratios(*sweeps(size, 'main'), of='perplexity')[method, 'kq', int(title)]:.3f}"

    check_cells(EXPERIMENTS, "Per token, at multiples of 16", METHODS, cell)


def test_the_papers_five_methods_are_its_perplexities_over_those_of_its_uncut_models():
    def cell(method: str, model: str, title: str) -> str:
        return rounded(paper_ratio(model, method, title.removesuffix(" %")))

    check_cells(EXPERIMENTS, "The paper's, per word too", METHODS, cell)


def test_units_and_uncut_models_are_those_of_the_records():
    delta_net, gated = (sweeps(size, "main")[0]["uncut"] for size in SIZES)
    words, tokens, text = delta_net["words"], delta_net["tokens"], delta_net["bytes"]
    check_says(
        EXPERIMENTS,
        f"words per token, {words / tokens:.3f} on",
        f"({tokens:,} tokens, {words:,} words, {text:,} bytes)",
        f"{delta_net['perplexity']:.2f} and {gated['perplexity']:.2f} per token",
        f"{delta_net['word_perplexity']:.1f} and {gated['word_perplexity']:.1f} per word uncut",
    )


def test_what_agrees_with_the_paper_and_what_does_not_is_so():
    by_size = {size: corrected(size) | ratios(*sweeps(size, "main")) for size in SIZES}
    everyone = [*by_size.values(), ratios(record("bundled"))]
    for each in everyone:
        widths = {width for _, score, width in each if score == "kq"}
        assert min(each.values()) > 1  # a cut never improves these models
        for width in widths:
            cost = {method: each[method, "kq", width] for method in METHODS}
            assert set(sorted(METHODS, key=cost.__getitem__)[:2]) == {"grad", "drrqr"}
            assert max(cost, key=cost.__getitem__) == "random"
        gaps = [each["l1", "kq", width] / each["drrqr", "kq", width] for width in sorted(widths)]
        assert gaps[0] == max(gaps)
    delta_net, gated = by_size.values()
    assert all(delta_net[key] > gated[key] for key in delta_net)
    delta_net, gated = (published(size) for size in SIZES)
    assert all(
        delta_net[method, "kq", width] < gated[method, "kq", width]
        for method in ("grad", "drrqr")
        for width in CUTS[1:]
    )
    for compression in ("30", "40", "50", "75"):
        for method in METHODS:
            assert paper_ratio("DeltaNet 1.3B", method, compression) > paper_ratio("Gated 1.3B", method, compression)
        for method in ("grad", "drrqr"):
            assert paper_ratio("DeltaNet 370M", method, compression) < paper_ratio("Gated 370M", method, compression)
    for model in PAPER:
        assert all(paper_ratio(model, "l1", each) > paper_ratio(model, "random", each) for each in ("30", "40", "50"))
    assert sum(paper_ratio(model, "drrqr", "30") < 1 for model in PAPER) == 2


# keys, queries, or both


def test_keys_queries_or_both_are_those_of_the_sweeps():
    def cell(method: str, size: str, score: str) -> str:
        return f"{ratios(*sweeps(size, 'scores'))[method, score, 64]:.3f}"

    check_cells(EXPERIMENTS, "Key dim 64, per word", METHODS[1:], cell)


def test_the_papers_keys_queries_or_both_are_its_perplexities_over_those_of_its_uncut_models():
    paper = record("paper")

    def cell(method: str, model: str, score: str) -> str:
        cut = paper["word_perplexity_by_score"]["cut"][method][PAPER[model]][score]
        return rounded(cut / paper["word_perplexity"][PAPER[model]]["uncut"])

    check_cells(EXPERIMENTS, "The paper's, per word, as ratios:", METHODS[1:], cell)


def test_what_is_said_of_keys_alone_and_of_condition_numbers_is_that_of_the_records():
    own = record("shared-filters")["own"]["sweep"]
    numbers = [
        found(own, "drrqr", 64, "k"),
        found(own, "drrqr", 64),
        found(own, "grad", 64, "k"),
        found(own, "grad", 64),
    ]
    drrqr_k, drrqr, grad_k, grad = (f"{row['perplexity']:.1f}" for row in numbers)
    main, scores = sweeps("DeltaNet 30M", "main", "scores")
    kappa = {method: f"{found(main, method, 64)['kappa']:,.0f}" for method in METHODS}
    check_says(
        EXPERIMENTS,
        f"`drrqr` {drrqr_k} against {drrqr}, `grad` {grad_k} against {grad}, of {own['uncut']['perplexity']:.1f} uncut",
        f"{kappa['random']} for `random`, {kappa['l1']} for `l1` and {kappa['grad']} and {kappa['drrqr']} for `grad`",
        f"and {found(scores, 'drrqr', 64, 'k')['kappa']:.0f} for `drrqr` judging by keys alone",
    )


# rotations


def test_rotations_are_those_of_the_sweeps():
    by_size = {size: ratios(*sweeps(size, "rotations")) for size in SIZES} | {
        "bundled": ratios(record("bundled-rotations"))
    }
    head, *body = table_after(EXPERIMENTS, "## Rotations")
    components = ["pca", "pca-adversarial", "pca-released", "pca-released-adversarial"]
    asked = [(method, score) for method in components for score in ("kq", "k")]
    assert [tuple(row[:2]) for row in body] == [*asked, ("random-rotation", "any")]
    assert head == ["method", "score", *(title for size in by_size for title in (f"{size}: 64", "32"))]
    for method, asked_by, *cells in body:
        score = "kq" if asked_by == "any" else asked_by
        assert cells == [several(each[method, score, width]) for each in by_size.values() for width in (64, 32)], method


def test_what_is_said_of_rotations_is_so():
    delta_net, gated = (ratios(*sweeps(size, "rotations")) for size in SIZES)
    bundled = ratios(record("bundled-rotations"))
    lost = [*delta_net.values(), *(ratio for key, ratio in bundled.items() if key[0] not in METHODS)]
    random = [corrected(size)["random", "kq", 64] for size in SIZES]
    turned, released = (
        [gated[method, score, width] for width in (64, 32)]
        for method, score in (("random-rotation", "kq"), ("pca-released", "k"))
    )
    check_says(
        EXPERIMENTS,
        f"The DeltaNets lose {min(lost):,.0f} times their word perplexity and more",
        f"{min(gated.values()):.1f} to {max(gated.values()):.1f} times",
        f"loses {random[0]:.1f} times on the DeltaNet 30M and {random[1]:.2f} times on the Gated DeltaNet",
        f"{gated['pca-released-adversarial', 'k', 64]:.1f} against {released[0]:.1f} as released",
        f"{turned[0]:.1f} against {released[0]:.1f} and {turned[1]:.1f} against {released[1]:.1f} on the Gated",
    )
    for each, width in itertools.product((delta_net, gated, bundled), (64, 32)):
        components = max(each["pca-released", "k", width], each["pca", "k", width])
        assert each["random-rotation", "kq", width] > components


# shared filters


def test_shared_filters_are_those_of_the_record():
    shared, paper = record("shared-filters"), record("paper")["shared_filters"]["rows"]
    titles = {"own": "of its own in every channel", "head": "one for each head", "all": "one for all heads"}
    rows = [
        [
            title,
            f"{shared[kind]['sweep']['uncut']['perplexity']:.1f}",
            f"{shared[kind]['sweep']['uncut']['word_perplexity']:,.0f}",
            *(f"{each:.1f}" for each in paper[kind]),
        ]
        for kind, title in titles.items()
    ]
    check_rows(
        EXPERIMENTS,
        "## Shared convolutions",
        "filters | ours, perplexity | per word | the paper, 370M, WikiText | LAMBADA | average of tasks",
        rows,
    )


def test_principal_components_are_those_of_the_record_and_of_the_paper():
    shared, paper = record("shared-filters"), record("paper")["principal_components"]
    rows = []
    components = ["pca-adversarial", "pca", "pca-released-adversarial", "pca-released"]
    for method, score in (*((each, "k") for each in components), ("random-rotation", "kq"), ("grad", "kq")):
        cut = [
            found(shared[kind]["sweep"], method, width, score) for kind in ("own", "head", "all") for width in (64, 32)
        ]
        theirs = [paper[kind].get(method, {}).get(share) for kind in ("own", "shared") for share in ("50", "75")]
        cells = [
            f"{number:.1e}".replace("e+0", "e") if number and number > 1e4 else "" if not number else f"{number:.1f}"
            for number in theirs
        ]
        rows.append([method, *(several(row["perplexity"]) for row in cut), *cells])
    ours = [f"{shared[kind]['sweep']['uncut']['perplexity']:.1f}" for kind in ("own", "head", "all")]
    uncut = [*ours, *(f"{paper['uncut'][kind]:.1f}" for kind in ("own", "shared"))]
    rows.append(["uncut", *(cell for number in uncut for cell in (number, ""))])
    check_rows(
        EXPERIMENTS,
        "### Principal components",
        " | own filters: 50 % | 75 % | one for each head: 50 % | 75 % | one for all: 50 % | 75 %"
        " | the paper, own: 50 % | 75 % | shared: 50 % | 75 %",
        rows,
    )
    own, head = (shared[kind]["sweep"] for kind in ("own", "head"))
    lost = [found(head, "pca-released", width, "k")["nats_over_uncut"] for width in (96, 64, 32)]
    turned = [*((each, "k") for each in components), ("random-rotation", "kq")]
    ruined = [found(own, method, width, score)["perplexity"] for method, score in turned for width in (64, 32)]
    rotated = [found(head, "random-rotation", width)["perplexity"] for width in (64, 32)]
    text, code = (
        [found(head, each, width, "k")["perplexity"] for width in (64, 32)] for each in ("pca", "pca-released")
    )
    check_says(
        EXPERIMENTS,
        f"({lost[0]:.2f} nats at key dim 96, {lost[1]:.2f} at 64, {lost[2]:.2f} at 32, by the code)",
        f"{rotated[0]:.1f} against {text[0]:.1f} and {code[0]:.1f} at 50 %",
        f"{rotated[1]:.1f} against {code[1]:.1f} by its code",
        f"({min(ruined) / own['uncut']['perplexity']:.0f} times the uncut perplexity and more)",
    )


def test_five_methods_on_shared_filters_are_those_of_the_record():
    kinds = {"own": "own", "each head": "head", "all": "all"}

    def cell(method: str, kind: str, title: str) -> str:
        return f"{found(record('shared-filters')[kinds[kind]]['sweep'], method, int(title))['perplexity']:.1f}"

    check_cells(EXPERIMENTS, "### The five methods on them", METHODS, cell)
    lost = ratios(record("shared-filters")["all"]["sweep"], of="perplexity")["random", "kq", 64] - 1
    check_says(EXPERIMENTS, f"half of it can go at random, for {100 * lost:.0f} %.")


# a hybrid and a Mamba-2


def test_the_hybrid_and_the_mamba_are_those_of_the_record():
    models = {"hybrid": "qwen3_next", "Mamba-2": "mamba2"}

    def cell(method: str, group: str, title: str) -> str:
        name, uncut = group.split(", uncut ")
        one = record("hybrids")[models[name]]["sweep"]
        assert uncut == f"{one['uncut']['perplexity']:.2f}"
        return f"{found(one, method, int(title.split(' (', maxsplit=1)[0]))['perplexity']:.2f}"

    check_cells(EXPERIMENTS, "## A hybrid and a Mamba-2", METHODS, cell)
    mamba = record("hybrids")["mamba2"]["sweep"]
    half = ratios(mamba, of="perplexity")
    lost = {method: f"{100 * (half[method, 'kq', 64] - 1):.1f}" for method in METHODS}
    check_says(
        EXPERIMENTS,
        f"`grad` and `drrqr` lose {lost['grad']} and {lost['drrqr']} %, `l1` {lost['l1']} and",
        f"`random` {lost['random']}; at 75 %",
    )


def test_how_much_of_the_state_is_used_is_that_of_the_sweeps():
    def cell(method: str, size: str, title: str) -> str:
        return f"{found(*sweeps(size, 'main'), method, int(title))['rank_utilisation']:.3f}"

    check_cells(EXPERIMENTS, "## How much of the state is used", METHODS, cell)
    delta_net, gated = (sweeps(size, "main")[0]["uncut"]["rank_utilisation"] for size in SIZES)
    check_says(EXPERIMENTS, f"Uncut: DeltaNet {delta_net:.3f}, Gated DeltaNet {gated:.3f}.")
    for size in SIZES:
        main = sweeps(size, "main")[0]
        used = [{method: found(main, method, width)["rank_utilisation"] for method in METHODS} for width in (32, 16)]
        assert set(sorted(METHODS, key=used[0].__getitem__)[-2:]) == {"grad", "drrqr"}
        assert max(METHODS, key=used[1].__getitem__) == "random"


# recovery


def recoveries():
    return {run["run"]: run for run in record("recovery")}


def runs():
    printed = record("reconstruction-30m")["recovered"]
    return {**{name: run["measured"]["nats"] for name, run in recoveries().items()}, printed["run"]: printed["nats"]}


def closed(cut: dict[str, float], control: float, digits: int = 0) -> str:
    return f"{100 * (cut['before'] - cut['after']) / (cut['before'] - control):.{digits}f} %"


TUNED = "gated tuned control"
TEXTS = ("wikitext2", "fineweb_edu", "calibration")


def test_long_recoveries_are_those_of_the_records():
    rows = []
    printed = record("reconstruction-30m")["recovered"]
    known = {**recoveries(), printed["run"]: printed}
    page = (ROOT / "docs" / EXPERIMENTS).read_text()
    for title, settings, name, control in (
        ("DeltaNet, key dim 64", "A", "long reconstructed-64", "long control"),
        ("DeltaNet by `s-wanda`, key dim 64", "A", "long s-wanda reconstructed-64", "long control"),
        ("DeltaNet, key dim 64", "B", "reconstructed-64", "control"),
        ("DeltaNet, key dim 32", "B", "reconstructed-32", "control"),
        ("DeltaNet by `s-wanda`, key dim 64", "C", "s-wanda reconstructed-64", "s-wanda control"),
        ("DeltaNet, key dim 64", "D", "mixers reconstructed-64", "mixers control"),
        ("DeltaNet, key dim 64", "I", "taught reconstructed-64", "tuned control"),
        ("Gated DeltaNet, key dim 64", "E", "gated long reconstructed-64", "gated long control"),
        ("Gated DeltaNet, key dim 64", "F", "gated reconstructed-64", "gated control"),
        ("Gated DeltaNet, key dim 64", "G", "gated no teacher 1e-3 reconstructed-64", "gated no teacher 1e-3 control"),
        ("Gated DeltaNet, key dim 64", "H", "gated no teacher 2e-3 reconstructed-64", "gated no teacher 2e-3 control"),
        ("Gated DeltaNet, key dim 64", "I", "gated taught reconstructed-64", TUNED),
        ("Gated DeltaNet by `s-wanda`, key dim 64", "I", "gated taught s-wanda reconstructed-64", TUNED),
        ("Gated DeltaNet by `s-wanda`, key dim 64", "J", "gated taught 1e-3 s-wanda reconstructed-64", TUNED),
        ("Gated DeltaNet by `s-wanda`, key dim 64", "K", "gated taught 4e-3 s-wanda reconstructed-64", TUNED),
        ("Gated DeltaNet, key dim 64", "L", "gated taught seed 1 reconstructed-64", TUNED),
        ("Gated DeltaNet by `s-wanda`, key dim 64", "L", "gated taught seed 1 s-wanda reconstructed-64", TUNED),
    ):
        run, after = runs()[name], runs()[control]["after"]
        method = "s-wanda" if "s-wanda" in name else "drrqr"
        size = "Gated 31M" if "gated" in name else "DeltaNet 30M"
        cut = found(*sweeps(size, "main"), method, int(name[-2:]))["nats_per_token"]
        numbers = (cut, run["before"], run["after"], after)
        share = closed({"before": cut, "after": run["after"]}, after, digits=1)
        told = f"{title}, {known[name]['tokens'] / 1e6:.1f}M tokens"
        rows.append([told, settings, *(f"{number:.4f}" for number in numbers), share])
        if "settings" in known[name]:
            (line,) = (line for line in page.splitlines() if line.startswith(f"# {settings}: "))
            assert all(flags in line for flags in _flags(known[name]["settings"])), name
    head = " | settings | cut | reconstructed | recovered | control | closed"
    check_rows(EXPERIMENTS, "At most 65.5M tokens, cut by", head, rows)
    shares = {(title.split(",")[0], settings): share for title, settings, *_, share in rows}
    (first, second), (wanda, again) = (
        [shares[name, settings] for settings in "IL"] for name in ("Gated DeltaNet", "Gated DeltaNet by `s-wanda`")
    )
    check_says(
        "guides/recover.md",
        f"closed on WikiText-2 {shares['DeltaNet', 'I']} for a DeltaNet, and for a Gated DeltaNet"
        f" {first.split()[0]} and {second} with two seeds of the recovery; cut by `s-wanda` {wanda.split()[0]} and {again}.",
        f"a DeltaNet's at {runs()['taught reconstructed-64']['after']:.2f}, and at"
        f" {runs()['long reconstructed-64']['after']:.2f} with the uncut model as the teacher",
    )
    apart = runs()["long reconstructed-64"]["after"] - runs()["long control"]["after"]
    assert f"came within {apart:.3f} nats" in (ROOT / "README.md").read_text()


def test_losses_of_a_cut_and_its_control_are_those_of_the_records():
    known, apart, ends, gained = recoveries(), [], [], []
    for rate in ("1e-3", "2e-3"):
        cut, control = (known[f"gated no teacher {rate} {name}"] for name in ("reconstructed-64", "control"))
        pairs = list(zip(cut["log"], control["log"], strict=True))
        assert all(ours["step"] == theirs["step"] for ours, theirs in pairs)
        late = [ours["loss"] - theirs["loss"] for ours, theirs in pairs if ours["step"] > 400]
        apart += [min(late), max(late)]
        ends.append(cut["measured"]["nats"]["after"] - control["measured"]["nats"]["after"])
        gained.append(control["measured"]["nats"]["before"] - control["measured"]["nats"]["after"])
    start, end = (known["gated no teacher 1e-3 reconstructed-64"]["measured"]["nats"][at] for at in ("before", "after"))
    taught = known["gated long reconstructed-64"]["measured"]["nats"]
    check_says(
        EXPERIMENTS,
        "by {:.3f} to {:.3f} nats at 1e-3, by {:.3f} to {:.3f} at 2e-3".format(*apart),
        "the same models end {:.3f} and {:.3f} apart".format(*ends),
        "itself gains {:.2f} and {:.2f} nats from the text of G and H".format(*gained),
        "gains {:.2f} with its old self as the teacher (A) and {:.2f} without".format(
            *(runs()[name]["before"] - runs()[name]["after"] for name in ("long control", "tuned control"))
        ),
        f"its cut goes from {start:.2f} to {end:.2f}",
        f"as it was ({taught['uncut']:.2f})",
        f"(E) it ends at {taught['after']:.2f}",
    )
    check_says(
        "guides/recover.md",
        f"ended at {taught['after']:.2f} nats with a large weight on it and at {end:.2f} with none",
    )
    speeds = [run["tokens_per_second"] for name, run in known.items() if name.startswith("gated no teacher")]
    least, most = (round(speed / 1000) * 1000 for speed in (min(speeds), max(speeds)))
    check_says("PERFORMANCE.md", f"at once trained {least:,} to {most:,} tokens/s each")


METHOD_OF = {"drrqr": "", "s-wanda": "s-wanda "}
TAUGHT = {  # by their letters on the page: the cuts by both methods, and the uncut model taught in the same way
    "I": ([f"gated taught {method}reconstructed-64" for method in METHOD_OF.values()], "gated taught control"),
    "L": (
        [f"gated taught seed 1 {method}reconstructed-64" for method in METHOD_OF.values()],
        "gated taught seed 1 control",
    ),
}
SWIFT, SWIFT_CONTROL = "gated taught 4e-3 s-wanda reconstructed-64", "gated taught 4e-3 control"


def on_three_texts():
    return {row["run"]: row["nats"] for row in record("control-teaches")["rows"]}


def share_of(cut: str, recovered: str, control: str, text: str = "wikitext2") -> str:
    before, after, end = (on_three_texts()[name][text] for name in (cut, recovered, control))
    return closed({"before": before, "after": after}, end, digits=1)


def pair(letter: str, control: str, text: str = "wikitext2") -> list[str]:
    """What the gated cuts of a letter close, without the sign of per cent."""
    named = zip(METHOD_OF, TAUGHT[letter][0], strict=True)
    return [share_of(f"cut {method}", name, control, text).split()[0] for method, name in named]


def test_a_control_that_teaches_is_measured_as_on_the_page():
    rows, after = on_three_texts(), {name: known["after"] for name, known in runs().items()}
    for name, nats in rows.items():
        assert name not in after or nats["wikitext2"] == after[name]
    again = ("gated tuned control again", *TAUGHT["L"][0])  # "the same nats to the last digit"
    for name, first in zip(again, (TUNED, *TAUGHT["I"][0]), strict=True):
        measured = "after" if first == TUNED else "before"
        assert runs()[name][measured] == runs()[first][measured]
    titles = {
        "cut by `drrqr`": "cut drrqr",
        "cut by `s-wanda`": "cut s-wanda",
        "the first, reconstructed": "reconstructed drrqr",
        "the second, reconstructed": "reconstructed s-wanda",
        "the control, which teaches": TUNED,
        "I by `drrqr`": TAUGHT["I"][0][0],
        "I by `s-wanda`": TAUGHT["I"][0][1],
        "J": "gated taught 1e-3 s-wanda reconstructed-64",
        "K": SWIFT,
        "L by `drrqr`": TAUGHT["L"][0][0],
        "L by `s-wanda`": TAUGHT["L"][0][1],
        "the uncut model, taught as in I": TAUGHT["I"][1],
        "the uncut model, taught as in K": SWIFT_CONTROL,
        "the uncut model, taught as in L": TAUGHT["L"][1],
        "DeltaNet: cut by `drrqr`": "cut DeltaNet",
        "DeltaNet: reconstructed": "reconstructed DeltaNet",
        "DeltaNet: the control, which teaches": "tuned control",
        "DeltaNet: I": "taught reconstructed-64",
        "DeltaNet: the uncut model, taught as in I": "taught control",
    }
    table = [[title, *(f"{rows[name][text]:.4f}" for text in TEXTS)] for title, name in titles.items()]
    check_rows(EXPERIMENTS, "Nats per token on three texts", " | WikiText-2 | FineWeb-Edu | Wikipedia", table)
    cuts = [name for names, _ in TAUGHT.values() for name in names]
    behind = [rows[name]["calibration"] - rows[TUNED]["calibration"] for name in cuts]
    seeds = [
        abs(rows[a]["wikitext2"] - rows[b]["wikitext2"]) for a, b in zip(TAUGHT["I"][0], TAUGHT["L"][0], strict=True)
    ]
    wiki, edu, like = ([*pair("I", TUNED, text), *pair("L", TUNED, text)] for text in TEXTS)
    plain = [share_of("cut DeltaNet", "taught reconstructed-64", "tuned control", text) for text in TEXTS]
    check_says(
        EXPERIMENTS,
        f"ends {after['gated no teacher 1e-3 reconstructed-64'] - after[cuts[0]]:.3f} nats below the best one",
        f"The DeltaNet's ends {after['long reconstructed-64'] - after['taught reconstructed-64']:.3f} below the one that",
        "close {} and {} % of the gap to that control on WikiText-2, with the other seed {} and {} %;".format(*wiki),
        "on FineWeb-Edu {} and {}, then {} and {} %;".format(*edu),
        "on Wikipedia {} and {}, then {} and {} %:".format(*like),
        f"they end {min(behind):.3f} to {max(behind):.3f} nats behind their teacher",
        f"up to {max(seeds):.3f} nats apart on WikiText-2, which is"
        f" {100 * max(seeds) / (rows['cut s-wanda']['wikitext2'] - rows[TUNED]['wikitext2']):.1f} % of such a gap",
        "The DeltaNet's cut closes {}, {} and {} on the three.".format(*plain).replace(" %", "", 2),
    )
    check_says(
        "guides/recover.md",
        f"ended at {after[cuts[0]]:.2f}, its teacher at {after[TUNED]:.2f}",
        f"the gated shares are {min(like, key=float)} to {max(like, key=float)} %, the DeltaNet's {plain[-1]};",
    )


def test_a_control_that_was_taught_as_well_is_measured_as_on_the_page():
    rows = on_three_texts()
    ends = [rows[name]["wikitext2"] for name in (TAUGHT["I"][1], SWIFT_CONTROL, TAUGHT["L"][1], "taught control")]
    (first, wanda), (second, again) = (pair(letter, control) for letter, (_, control) in TAUGHT.items())
    delta_net = share_of("cut DeltaNet", "taught reconstructed-64", "taught control")
    check_says(
        EXPERIMENTS,
        "ends at {:.4f} (I), {:.4f} (K) and {:.4f} (L), the DeltaNet at {:.4f}.".format(*ends),
        f"close {first} and {second} % by `drrqr`, {wanda} and {again} % by `s-wanda` (I and L),"
        f" {share_of('cut s-wanda', SWIFT, SWIFT_CONTROL)} in K; the DeltaNet's closes {delta_net}.",
    )
    least, *_, most = sorted((first, second, wanda, again), key=float)
    told = f"on WikiText-2 are {delta_net} for the DeltaNet, {least} to {most} % for the gated model"
    check_says("guides/recover.md", told)


def remembered() -> dict[tuple[str, int, str], list[float]]:
    """For every seed the mean over numbers of pairs, as `eval --associative` gives it."""
    made = record("recall")
    return {
        (row["model"], row["key_dim"], row["what"]): [
            statistics.mean(right / asked for right, asked in zip(seed, made["questions"], strict=True))
            for seed in row["right"]
        ]
        for row in made["rows"]
    }


def standard_errors(scores: Iterable[list[float]]) -> list[float]:
    """In points, over the seeds."""
    return [100 * statistics.stdev(seeds) / len(seeds) ** 0.5 for seeds in scores]


def test_what_recovered_models_remember_is_that_of_the_record():
    gated, plain = "gated_deltanet-31m", "delta_net-30m"
    cuts = TAUGHT["L"][0]
    whole = {
        "uncut": ("uncut", "uncut"),
        "the control, which teaches": (TUNED, "tuned control"),
        "the uncut model, taught as in L": (TAUGHT["L"][1], None),
    }
    halved = {
        "key dim 64 by `drrqr`, recovered": (cuts[0], "taught reconstructed-64"),
        "key dim 64 by `s-wanda`, recovered": (cuts[1], None),
    }
    scores = remembered()
    known = {name: statistics.mean(seeds) for name, seeds in scores.items()}

    def cell(model: str, key_dim: int, name: str | None) -> str:
        return "" if name is None else f"{100 * known[model, key_dim, name]:.1f} %"

    table = [
        [title, *(cell(model, key_dim, name) for model, name in zip((gated, plain), names, strict=True))]
        for key_dim, part in ((128, whole), (64, halved))
        for title, names in part.items()
    ]
    head = " | Gated DeltaNet, L | DeltaNet, I"
    check_rows(EXPERIMENTS, "**Recall stays furthest behind.**", head, table)
    (seeds,) = {len(row["right"]) for row in record("recall")["rows"]}
    questions = seeds * sum(record("recall")["questions"])
    largest = max(standard_errors(scores.values()))
    check_says(
        EXPERIMENTS,
        f"over {seeds} seeds of it, {questions:,} questions in all",
        f"A standard error over the seeds is at most {largest:.1f} points",
    )
    few, many = sorted(100 * known[gated, 64, name] for name in cuts)
    told = f"score {few:.0f} to {many:.0f} %, their teacher {100 * known[gated, 128, TUNED]:.0f} %"
    check_says("guides/recover.md", told)
    assert {round(known[gated, 64, name] / known[gated, 128, TUNED], 1) for name in cuts} == {0.8}
    assert known[plain, 128, "uncut"] < known[plain, 64, "taught reconstructed-64"]
    assert known[plain, 64, "taught reconstructed-64"] < known[plain, 128, "tuned control"]


def _flags(settings) -> list[str]:
    """As the page has them; a temperature and a seed where they are not the usual ones."""
    least = f"{settings['min_lr']:.1e}".replace(".0e", "e").replace("e-0", "e-")
    words = [
        "--full" if settings["full"] else "--mixers",
        f"--lr {settings['lr']:.0e} --min-lr {least}".replace("e-0", "e-"),
        f"--kd-weight {settings['kd_weight']:g} --batch-size {settings['batch_size']} --length {settings['length']}",
        f"--steps {settings['steps']}",
    ]
    unusual = [(name, value) for name, value in (("temperature", 2), ("seed", 0)) if settings[name] != value]
    return [" ".join(words), *(f"--{name} {settings[name]:g}" for name, _ in unusual if settings["kd_weight"])]


def test_recoveries_of_all_methods_are_those_of_the_records():
    control, rows, after = runs()["s-control"], [], {}
    for method in reversed(METHODS):
        for width in (64, 32):
            cut = runs()["drrqr-64 full 1e-3 kd 4" if (method, width) == ("drrqr", 64) else f"s-{method}-{width}"]
            rows.append(
                [
                    f"{method}, key dim {width}",
                    f"{cut['before']:.4f}",
                    f"{cut['after']:.4f}",
                    closed(cut, control["after"]),
                ]
            )
            after[method, width] = cut["after"]
    check_rows(EXPERIMENTS, "### All five methods", "cut | before | after | closed", rows)
    ahead = [after[worse, 64] - after[better, 64] for worse in ("drrqr", "grad") for better in ("l1", "s-wanda")]
    informed = [after[method, 32] for method in METHODS[1:]]
    check_says(
        EXPERIMENTS,
        f"The control goes from {control['before']:.4f} to {control['after']:.4f}.",
        f"end {min(ahead):.3f} to {max(ahead):.3f} nats ahead of them",
    )
    spread = math.ceil(1000 * (max(informed) - min(informed))) / 1000
    check_says(EXPERIMENTS, f"at key dim 32 four methods end within {spread:.3f}.")
    assert all(max(METHODS, key=lambda method: after[method, width]) == "random" for width in (64, 32))
    starts = [runs()[name]["before"] for name in ("s-wanda reconstructed-64", "reconstructed-64")]
    check_says(EXPERIMENTS, "before any recovery: {:.4f} against {:.4f} in the first table".format(*starts))


LORA_64 = "--lora-targets all-linear --lora-rank 64 --lora-alpha 64"


def test_settings_of_recovery_are_those_of_the_records():
    named = {
        "`--lora --lr 2e-3 --min-lr 2e-4 --kd-weight 1` (r 16)": "lora 2e-3",
        f"`{LORA_64} --lr 2e-3 --min-lr 2e-4 --kd-weight 1`": "all-linear r64 2e-3",
        "`--full --lr 5e-4 --min-lr 5e-5 --kd-weight 1`": "full 5e-4",
        "`--full --lr 1e-3 --min-lr 1e-4 --kd-weight 1`": "full 1e-3",
        "`--full --lr 2e-3 --min-lr 2e-4 --kd-weight 1`": "full 2e-3",
        "`--full --lr 1e-3 --min-lr 1e-4 --kd-weight 4`": "full 1e-3 kd 4",
        "`--full --lr 1e-3 --min-lr 1e-4 --kd-weight 16`": "full 1e-3 kd 16",
    }
    tried = {title: runs()[f"drrqr-64 {name}"] for title, name in named.items()}
    rows = [[title, f"{cut['after']:.4f}", closed(cut, cut["uncut"])] for title, cut in tried.items()]
    check_rows(EXPERIMENTS, "### Which settings", "settings | after | closed, to the uncut model", rows)


def test_defaults_of_recovery_were_tried_on_four_models():
    known = {**runs(), "DeltaNet full 1e-3 kd 4": runs()["drrqr-64 full 1e-3 kd 4"]}
    rows = []
    for title, name in {
        "`--lora --lr 1e-4 --min-lr 1e-5 --kd-weight 1`": "lora 1e-4 kd 1",
        "`--lora --lr 1e-3 --min-lr 1e-4`": "lora 1e-3 kd 4",
        "`--mixers --min-lr 5e-5`": "mixers 5e-4 kd 4",
        "`--mixers --lr 1e-3 --min-lr 1e-4`": "mixers 1e-3 kd 4",
        "`--full --min-lr 5e-5`": "full 5e-4 kd 4",
        "`--full --lr 1e-3 --min-lr 1e-4`": "full 1e-3 kd 4",
    }.items():
        tried = [known.get(f"{model} {name}") for model in ("DeltaNet", "bundled", "hybrid", "Gated DeltaNet")]
        rows.append([title, *("" if run is None else closed(run, run["uncut"]) for run in tried)])
    check_rows(EXPERIMENTS, "above 100 %", "settings | DeltaNet | bundled | hybrid | Gated DeltaNet", rows)
    low, high, spoilt = (known[f"gated short {name}"] for name in ("full 5e-4", "full 1e-3", "control 1e-3 kd 4"))
    check_says(
        EXPERIMENTS,
        f"cut ({low['before']:.4f}) the gated one came to {low['after']:.4f} at 5e-4",
        f"at 5e-4 and to {high['after']:.4f} at 1e-3",
        f"worse than it was ({spoilt['before']:.4f} to {spoilt['after']:.4f}, 4.1M tokens)",
    )


def test_reconstructions_of_the_bundled_model_are_those_of_the_record():
    told = record("bundled-reconstruction")
    lost = {(row["command"], row["key_dim"]): row["nats_per_token"] - told["uncut"] for row in told["rows"]}
    rows = []
    some, more = (f"--reconstruct --reconstruct-steps {steps} --distill {steps}" for steps in (30, 115))
    for given in ("", "--reconstruct", some, more):
        title, flags, cells = (f"`{given}`", f" {given}", []) if given else ("cut only", "", [])
        for width in (64, 32):
            start = f"slimstate prune demo/model --key-dim {width} --data demo/calibration.txt"
            (row,) = (row for row in told["rows"] if row["command"] == f"{start}{flags} --out SLIM")
            ours = lost[row["command"], width]
            share = f"{1 - ours / lost[f'{start} --out SLIM', width]:.0%}".replace("%", " %")
            minutes, seconds = divmod(round(row["seconds"] or 0), 60)
            cells.append(f"{ours:.3f}" + (f", {share} back in {minutes} min {seconds} s" if flags else ""))
        rows.append([title, *cells])
    check_rows("RECONSTRUCT.md", "The bundled model on two idle", " | key dim 64 | 32", rows)


# engines


@pytest.mark.parametrize(
    ("page", "name"), [("mlx-lm.md", "verify-mlx"), ("llama.cpp.md", "verify-llama"), ("vllm.md", "verify-vllm")]
)
def test_what_engines_do_is_what_their_records_say(page, name):
    head, *body = table_after(f"serving/{page}", f"records/{name}.json")
    rows = {(row["model"], str(row["key_dim"])): row for row in record(name)["rows"]}
    assert len(rows) == len(body) * (len(head) - 1)
    for model, *cells in body:
        for key_dim, cell in zip(head[1:], cells, strict=True):
            row = rows[model, key_dim]
            measured = "" if row["verdict"] == "refuses" else f" {max(row['prefill'], row['decoding']):.0e}"
            assert cell == row["verdict"] + measured, (model, key_dim)


def test_what_sglangs_kernels_do_is_what_the_record_says():
    titles = {
        "gated delta rule, decoding": "gated_delta decode",
        "gated delta rule, prefill": "gated_delta prefill",
        "Mamba-2, decoding": "state_space decode",
        "Mamba-2, prefill": "state_space prefill",
        "projections of Qwen3-Next": "Qwen3-Next projections",
        "projections of Qwen3.5, decoding with CUDA": "Qwen3.5 projections, decode with CUDA",
        "projections of Qwen3.5, elsewhere": "Qwen3.5 projections, elsewhere",
        "queries, keys and values, prefill": "queries, keys and values, prefill",
    }
    kept = record("sglang-kernels")
    rows = {(row["kernel"], str(row["key_dim"])): row for row in kept["rows"]}

    def cell(row: dict[str, object]) -> str:
        return "refused" if "error" in row else f"{row['difference']:.0e}" if row["difference"] else "0"

    (_, *head), *body = table_after("serving/sglang.md", "records/sglang-kernels.json")
    assert [name for name, *_ in body] == list(titles)
    for name, *cells in body:
        assert cells == [cell(rows[titles[name], key_dim]) for key_dim in head], name
    assert len(rows) == len(body) * len(head)
    (words,) = {row["error"] for row in rows.values() if "error" in row}
    check_says("serving/sglang.md", f'Refused is "{words}".', f"The kernels of SGLang {kept['version']} were run")
    assert kept["versions"]["triton"].startswith("3.8")


# reconstruction


def test_what_a_reconstruction_brings_is_that_of_its_record():
    rows = record("reconstruction-30m")["rows"]

    def nats_of(model: str, key_dim: int, best: bool = False, **wanted: object) -> float:
        found = [
            row["nats_over_uncut"]["wikitext2"]
            for row in rows
            if (row["model"], row["key_dim"]) == (model, key_dim)
            and all(row.get(name) == value for name, value in wanted.items())
        ]
        return min(found) if best else found[0]

    def alone(model: str, key_dim: int) -> float:
        sweep = record(f"sweep-{model}-main")
        return found(sweep, "drrqr", key_dim)["nats_per_token"] - sweep["uncut"]["nats_per_token"]

    cells = [(model, key_dim) for model in ("delta_net-30m", "gated_deltanet-31m") for key_dim in (64, 32, 16)]
    lines = [
        [alone(*cell) for cell in cells],
        *([nats_of(*cell, way="--reconstruct", steps=steps) for cell in cells] for steps in (500, 600)),
        [nats_of(*cell, way="--distill 300") for cell in cells],
    ]
    _, *body = table_after("RECONSTRUCT.md", "## What it brings")
    for (_, *told), line in zip(body, lines, strict=True):
        assert told == [f"{value:.3f}" for value in (*line, sum(line))]
    wanda = nats_of("delta_net-30m", 64, way="--method s-wanda --reconstruct --distill 300")
    check_says("RECONSTRUCT.md", f"reconstructed and distilled, costs {wanda:.3f};")
    _, *body = table_after("RECONSTRUCT.md", "What else was tried, at key dim 32")
    for way, *told in body:
        usual = {"way": way, "steps": 400, "learning_rate": 1e-3}
        assert told == [f"{nats_of(model, 32, **usual):.3f}" for model in ("delta_net-30m", "gated_deltanet-31m")]


def test_what_is_remembered_after_a_reconstruction_is_that_of_the_record():
    models = {"DeltaNet": "delta_net-30m", "Gated DeltaNet": "gated_deltanet-31m"}
    scores = remembered()
    recall = {name: statistics.mean(seeds) for name, seeds in scores.items()}
    fewer = [row for row in record("reconstruction-30m")["associative_recall"] if row["model"] == "delta_net-30m"]
    recall |= {(row["model"], row["key_dim"], row["what"]): row["mean"] for row in fewer}
    (few,), many = (
        {row["questions"] for row in fewer},
        sum(record("recall")["questions"]) * len(next(iter(scores.values()))),
    )
    shown = [
        seeds
        for (model, _, what), seeds in scores.items()
        if what in ("uncut", "cut", "reconstructed") and "gated" in model
    ]
    check_says(
        "RECONSTRUCT.md",
        f"The DeltaNet was asked {few} questions",
        f"the gated one {many:,}",
        f"a standard error of at most {max(standard_errors(shown)):.1f} points",
    )

    def cell(what: str, model: str, title: str) -> str:
        if title == "uncut":
            return f"{100 * recall[models[model], 128, 'uncut']:.1f} %" if what == "cut" else ""
        return f"{100 * recall[models[model], int(title), what]:.1f} %"

    check_cells("RECONSTRUCT.md", "What the models remember", ["cut", "reconstructed"], cell)


def test_what_weights_by_gradients_bring_is_that_of_the_record():
    rows = record("reconstruction-30m")["drrqr_weighted"]
    _, *body = table_after("RECONSTRUCT.md", "## Choosing with the gradient")
    for title, *told in body:
        line = [
            row["nats_over_uncut"]
            for row in rows
            if title.removeprefix("by ").startswith(row["tokens_count_by"])
            or (title.startswith("all") and row["tokens_count_by"] == "all alike")
        ]
        assert told == [f"{value:.3f}" for value in (*line, sum(line))]


def test_times_of_reconstructions_are_those_of_the_record():
    alone, large = record("reconstruction-30m")["seconds_alone"], record("reconstruction-30m")["delta_net-1.3b"]
    step = alone["step_ms"]
    hidden, peak = large["hidden_states_gib"], large["peak_allocated_gib"]
    check_says(
        "RECONSTRUCT.md",
        "took {:.0f} s (DeltaNet) and {:.0f} s (gated)".format(
            *(alone[model]["command"] for model in ("delta_net-30m", "gated_deltanet-31m"))
        ),
        f"takes {step['launched_one_by_one']} ms where its kernels are launched one by one, and {step['recorded']} ms",
        f"took {large['command_seconds']:.0f} s, and {peak:.1f} GiB of the GPU at most:"
        f" {hidden:.1f} GiB of hidden states and {peak - hidden:.1f} GiB to train one layer.",
    )


def test_the_memory_of_a_large_reconstruction_is_that_of_the_record():
    made, cut = record("large-reconstruction"), record("large")
    parts, settings, peak = made["first_layer_bytes"], made["reconstructed"], made["peak_bytes"]
    assert [made[name] for name in ("checkpoint_bytes", "shards")] == [
        cut[name] for name in ("checkpoint_bytes", "shards")
    ]
    assert peak < 3e9
    sizes = [parts["before_the_first_layer"], parts["experts"], parts["other_weights"], 6 * parts["trained_weights"]]
    told = [float(row[-1]) for row in table_after("RECONSTRUCT.md", "records/large-reconstruction.json")[1:]]
    assert told == [round(size / 1e9, 2) for size in (*sizes, peak - sum(sizes), peak)]
    check_says(
        "RECONSTRUCT.md",
        f"{made['layers']} layers, {made['experts']} experts, random weights, {made['checkpoint_bytes'] / 1e9:.2f} GB",
        f"{settings['samples']} windows of {settings['length']} tokens and {settings['steps']} steps a layer",
        f"took {made['seconds']:.0f} s and {peak / 1e9:.2f} GB at the peak",
        f"{parts['hidden_states'] / 1e9:.2f} GB are hidden states",
        f"Until a layer is trained, the peak is {parts['peak_before_it_is_trained'] / 1e9:.2f} GB",
    )


def check_kernel_times(after: str, times: dict[tuple[str, str, int], float]) -> None:
    """A table of vLLM's page: milliseconds by shape and mode, and gains of the decoding in the row above them."""
    shapes = {"Qwen3-Next": "qwen3_next", "Qwen3.5": "qwen3_5", "Mamba-2": "mamba2"}
    modes = {"decoding": "decode", "prefill": "prefill"}
    (_, *head), *body = table_after("serving/vllm.md", after)
    line: list[float] = []
    for name, *cells in body:
        if name == "against 128":
            assert cells == ["1", *(f"{line[0] / ms:.2f}x" for ms in line[1:])]
        else:
            shape, mode = name.split(", ")
            line = [times[shapes[shape], modes[mode], int(key_dim)] for key_dim in head]
            assert cells == [f"{ms:.2f}" for ms in line]


def test_times_of_vllms_kernels_are_those_of_the_record():
    printed = {(row["model"], row["mode"], row["key_dim"]): row["ms"] for row in record("vllm-kernels")["rows"]}
    check_kernel_times("slimstate bench decode --kernels", printed)
    rows = record("vllm-kernels-mamba2")["rows"]
    timed = {(row["model"], row["mode"], row["key_dim"]): 1000 * row["seconds"] for row in rows}
    check_kernel_times("records/vllm-kernels-mamba2.json", timed)
    kept = [KernelRecord.from_json(json.loads(path.read_text())) for path in sorted(CURVES.glob("h200-vllm-*.json"))]
    for row in (row for curve in kept for row in curve.rows):
        assert 1000 * row.time == pytest.approx((printed | timed)[row.model, row.mode, row.key_dim])


def test_what_the_front_page_says_of_reconstruction_is_that_of_its_page():
    _, *body = table_after("RECONSTRUCT.md", "## What it brings")
    alone, by_default, _, far = ([float(cell) for cell in row[1:-1]] for row in body)
    after = (by_default, far)
    back = [[100 * (1 - nats / cut) for nats, cut in zip(line, alone, strict=True)] for line in after]
    rebuilt, distilled = (f"{min(line):.0f} to {max(line):.0f} %" for line in back)
    check_says("README.md", f"got {rebuilt} of the loss back, {distilled} with 600 steps and `--distill 300`")
