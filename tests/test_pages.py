"""Numbers on the pages about models are those of the records they name, and what is said of their order is so."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics

import pytest

from places import ROOT
from reading_pages import (
    EXPERIMENTS,
    METHODS,
    PAGES,
    RECORDS,
    SIZES,
    Ratios,
    asked_to_remember,
    check_cells,
    check_rows,
    check_says,
    found,
    ratios,
    record,
    remembered,
    standard_errors,
    sweeps,
    table_after,
)
from slimstate.records.benchmark import KernelRecord
from slimstate.records.sweep import SweepRecord

PUBLISHED = "AS_PUBLISHED.md"
PAPER = {
    "DeltaNet 370M": "delta_net-370m", "DeltaNet 1.3B": "delta_net-1.3b",
    "Gated 370M": "gated_deltanet-370m", "Gated 1.3B": "gated_deltanet-1.3b",
}  # fmt: skip
CUTS = (89, 76, 64, 32, 16)
CURVES = ROOT / "src" / "slimstate" / "serving" / "curves"


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
    (few,) = {row["questions"] for row in fewer}
    _, many = asked_to_remember()
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
