"""Numbers of the front page are those of the records behind the pages it leads to."""

from __future__ import annotations

import json

from places import ROOT
from reading_pages import check_rows, check_says, found, record

PAGE = "README.md"


def test_what_a_cut_of_the_bundled_model_costs_is_that_of_its_record():
    sweep = record("bundled")
    uncut, methods = sweep["uncut"], ("random", "l1", "s-wanda", "grad", "drrqr")
    measured = {"uncut": [uncut, uncut]}
    measured |= {method: [found(sweep, method, key_dim) for key_dim in (64, 32)] for method in methods}
    rows = []
    for name, cuts in measured.items():
        cells = [(f"{cut['perplexity']:.1f}", f"{cut['word_perplexity']:,.0f}") for cut in cuts]
        rows.append([name, *cells[0], *cells[1]])
    head = "method | key dim 64 of 128: per token | per word | key dim 32: per token | per word"
    check_rows(PAGE, "## Three commands", head, rows)
    check_says(PAGE, f"(perplexity on WikiText-2, {uncut['tokens']:,} tokens, {uncut['words']:,} words, no retraining")


def test_what_the_epsilon_and_recovery_do_is_that_of_their_records():
    left, corrected = (
        found(record(f"sweep-delta_net-30m-{kind}"), "l1", 32)["perplexity"] for kind in ("kept", "main")
    )
    check_says(PAGE, f"has {left / corrected:.2f} times the perplexity per token that it has with it")
    runs = {run["run"]: run for run in record("recovery")}
    cut, control = (runs[name]["measured"]["nats"] for name in ("t-drrqr-64", "t-control"))
    closed = (cut["before"] - cut["after"]) / (cut["before"] - control["after"])
    check_says(PAGE, f"{runs['t-drrqr-64']['tokens'] / 1e6:.1f}M tokens, closed {100 * closed:.0f} % of the gap")


def test_speeds_and_memory_are_those_of_the_benchmarks():
    names = ("bench-mixer", "bench-mixer-4096", "bench-mixer-again", "bench-mixer-no-gate")
    rows = [row for name in names for row in record(name)["rows"]]
    rows += json.loads((ROOT / "src/slimstate/serving/curves/h200.json").read_text())["rows"]
    half = [row for row in rows if (row["key_dim"], row["mode"]) == (64, "forward")]
    step = next(row for row in rows if (row["model"], row["key_dim"], row["mode"]) == ("delta_net", 64, "train"))
    speeds, memory = ([row[name] for row in half] for name in ("speedup", "memory_ratio"))
    decoding = record("bench-decode")
    key = ("delta_net-1.3b", 64, 1024)
    faster = next(row for row in decoding["rows"] if (row["model"], row["key_dim"], row["batch"]) == key)["speedup"]
    most = {(each["model"], each["key_dim"]): each["batch"] for each in decoding["largest_batch"]}
    check_says(
        PAGE,
        f"a layer {min(speeds):.2f} to {max(speeds):.2f} times as fast (forward)",
        f"in {min(memory):.2f} to {max(memory):.2f} of the memory",
        f"a training step of a DeltaNet layer {step['speedup']:.2f} times in {step['memory_ratio']:.2f}",
        f"a 1.3B DeltaNet {faster:.2f} times as fast",
        f"with {most['delta_net-1.3b', 64] / most['delta_net-1.3b', 128]:.1f} times as many sequences in the card",
    )
