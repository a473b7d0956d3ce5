"""Numbers of the page of other measurements are those of the records it names."""

from __future__ import annotations

import math

from reading_pages import check_rows, check_says, ratios, record

PAGE = "MEASURED.md"
GATED_RULE = {
    "gated_deltanet", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid",
    "minicpmv4_6", "minicpmv4_7", "minicpm_ocr",
}  # fmt: skip
DECAY_BY_CHANNEL = {"gla", "kda", "rwkv6", "linear_attn"}
QWEN4 = {"qwen4_exp", "qwen4_exp_text"}
NOISY = {"bamba", *GATED_RULE} - {"gated_deltanet", "olmo_hybrid", "qwen3_5_text"}


def differences(dtype: str, kind: str, families: set[str]) -> tuple[float, float]:
    """The least and the most among families of the larger of keys and queries."""
    tested = record("devices")["families"]
    largest = [max(value for name, value in tested[family][dtype].items() if kind in name) for family in families]
    return min(largest), max(largest)


def powers(numbers: tuple[float, float]) -> str:
    return " to ".join(f"{number:.0e}".replace("e-0", "e-") for number in numbers)


def percent(numbers: tuple[float, float], places: int = 0) -> str:
    return " to ".join(f"{100 * number:.{places}f}".removesuffix(".0") for number in numbers) + " %"


def test_calibration_on_a_gpu_is_that_of_the_record():
    everyone = {*record("devices")["families"]}
    groups = [GATED_RULE | DECAY_BY_CHANNEL, {"comba"}, QWEN4]
    rest = everyone - set().union(*groups)
    cells = {}
    for kind in ("gram", "square"):
        some, comba, qwen4 = (powers(differences("float32", kind, group)) for group in groups)
        cells[kind] = some, comba.split(" to ")[0], qwen4, powers(differences("float32", kind, rest)).split(" to ")[1]
    by_channel = powers(differences("float32", "gradient", DECAY_BY_CHANNEL))
    qwen4 = " to ".join(f"{each:.2f}" for each in differences("float32", "gradient", QWEN4))
    others = powers(differences("float32", "gradient", everyone - DECAY_BY_CHANNEL - QWEN4)).split(" to ")[1]
    quiet = everyone - NOISY - {"qwen3_5_text"}
    some, most = (percent(differences("bfloat16", "gradient", families)) for families in (quiet, NOISY))
    one = differences("bfloat16", "gradient", {"qwen3_5_text"})[1]
    named = "Gated DeltaNet and hybrids with its rule, GLA, KDA, RWKV-6, `linear_attn`"
    in_float32 = [
        f"{named} {{}}; Comba {{}}; Qwen4 {{}}; others {{}}".format(*cells["gram"]),
        "in the same order {}; {}; {}; {}".format(*cells["square"]),
        f"GLA, KDA, RWKV-6, `linear_attn` {by_channel}; Qwen4 {qwen4}; others {others}",
    ]
    in_bfloat16 = [
        percent(differences("bfloat16", "gram", everyone), 1),
        percent(differences("bfloat16", "square", everyone), 1),
        f"{some}; Bamba, MiniCPM, Qwen3-Next and Qwen3.5 {most}, but `qwen3_5_text` {100 * one:.0f} %",
    ]
    titles = ["Gram matrices of keys and queries", "squares of the inputs", "gradients"]
    rows = [list(row) for row in zip(titles, in_float32, in_bfloat16, strict=True)]
    check_rows(PAGE, "## Calibration on a GPU", " | float32 | bfloat16", rows)


def test_what_the_epsilon_costs_is_that_of_the_sweeps():
    kept, main = (ratios(record(f"sweep-delta_net-30m-{kind}"), of="perplexity") for kind in ("kept", "main"))
    l1, drrqr = ([f"{each[method, 'kq', 32]:.2f}" for each in (kept, main)] for method in ("l1", "drrqr"))
    check_says(
        PAGE,
        f"has {l1[0]} times the uncut perplexity per token, where zeroing the same rows gives {l1[1]} times",
        f"`drrqr` {drrqr[0]} instead of {drrqr[1]}",
    )


def test_selection_is_that_of_the_record():
    made = record("selection")
    rows = [
        ["head by head", f"{made['paper_seconds']:.1f}", "1"],
        ["slimstate, all heads in one batch", f"{made['slimstate_seconds']:.2f}", f"1 / {made['speed_up']:.0f}"],
    ]
    check_rows(PAGE, "## Selection", " | seconds | ratio", rows)
    sizes = f"{made['heads']} heads of width {made['width']}, keep {made['keep']}, against QR with column pivoting of"
    timed = f"({made['paper_heads_timed']} heads timed, scaled to {made['heads']})"
    same = f"chosen in {made['same_choice'].replace(' of ', ' of the ')} heads"
    check_says(PAGE, f"{sizes} {made['rows']} x {made['width']} float32 rows", timed, same)


def test_the_memory_of_a_calibration_is_that_of_the_record():
    made = record("memory")
    (few, little), (many, much) = made["peak_kib"].items()
    check_says(PAGE, f"for {few} and for {many} windows of {made['length']} tokens", f"is {little:,} and {much:,} KiB")
    assert much < 1.02 * little


def test_the_cut_of_a_large_checkpoint_is_that_of_the_record():
    made = record("large")
    whole, peak, before = (
        f"{made[name] / 1e9:.2f} GB" for name in ("checkpoint_bytes", "peak_bytes", "peak_bytes_before")
    )
    check_says(
        PAGE,
        f"({made['layers']} layers, {made['experts']} experts, random weights, {whole} in {made['shards']} shards)",
        f"{made['seconds']:.0f} s, {peak} at the peak, {before} of which",
    )


def test_what_is_forgotten_is_that_of_the_records():
    cuts = {key_dim: record(f"bundled-eval-{key_dim}") for key_dim in (64, 32)}
    uncut = cuts[64]["baseline"]
    asked = uncut["associative_recall"]
    rows = [["uncut", "1", "1", f"{asked['mean']:.2f}"]]
    for key_dim, cut in cuts.items():
        assert cut["key_dim"] == key_dim
        over = [f"{cut[name] / uncut[name]:.2f}" for name in ("perplexity", "word_perplexity")]
        rows.append([f"key dim {key_dim}", *over, f"{cut['associative_recall']['mean']:.2f}"])
    check_rows(PAGE, "## What is forgotten", " | perplexity per token, over uncut | per word | names recalled", rows)
    points = asked["points"]
    names = f"{points[0]['pairs']} to {points[-1]['pairs']} names in {asked['length']} tokens"
    error = math.hypot(*(point["stderr"] for point in points)) / len(points)
    check_says(PAGE, f"the mean over {names}, where chance is 1 in {asked['candidates']}")
    check_says(PAGE, f"The standard error of the uncut model's mean is {error:.2f}")
