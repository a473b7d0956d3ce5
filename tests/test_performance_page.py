"""Numbers of the page about speed and memory are those of the records it names."""

from __future__ import annotations

import json

from places import ROOT
from reading_pages import check_rows, check_says, record, table_after

PAGE = "PERFORMANCE.md"
LAYERS = {"DeltaNet": "delta_net", "Gated DeltaNet": "gated_deltanet"}
GIB = 2**30


def rows_of(name: str, model: str, mode: str | None = None) -> dict[int, dict]:
    """By key dim, those of one model (and mode) in a record; what could not be measured is left out."""
    rows = [row for row in record(name)["rows"] if row["model"] == model and "seconds" in row]
    return {row["key_dim"]: row for row in rows if mode in (None, row["mode"])}


def ms(row: dict, places: int) -> str:
    return f"{1000 * row['seconds']:.{places}f}"


def faster(row: dict) -> str:
    return f"{row['speedup']:.2f}x"


def gib(row: dict) -> str:
    return f"{row['peak_bytes'] / GIB:.2f} GiB"


def paper_mixer(model: str, key_dim: int) -> dict:
    return record("paper")["mixers"]["rows"][model][str(key_dim)]


def paper_speedups(model: str, *compressions: str) -> list[str]:
    speedups = record("paper")["speedup"]["compression"]
    return [f"{speedups[compression][model]:.2f}x" for compression in compressions]


def test_one_layer_is_that_of_the_record():
    expected = []
    for title, model in LAYERS.items():
        for key_dim in (128, 96, 64, 32):
            row, paper = [title if key_dim == 128 else "", str(key_dim)], ["", ""]
            for mode in ("forward", "train"):
                timed = rows_of("bench-mixer", model, mode)[key_dim]
                row += [
                    ms(timed, 2),
                    *(["1", gib(timed)] if key_dim == 128 else [faster(timed), f"{timed['memory_ratio']:.2f}"]),
                ]
            if key_dim != 96:
                theirs, widest = paper_mixer(model, key_dim), paper_mixer(model, 128)
                paper = [f"{theirs['speedup']:.2f}x", f"{theirs['gib'] / widest['gib']:.2f}"]
                paper = (
                    [f"{theirs['tokens_per_second']} tokens/s", f"{theirs['gib']:.2f} GiB"] if key_dim == 128 else paper
                )
            expected.append([*row, *paper])
    check_rows(
        PAGE,
        "## One layer",
        "layer | key dim | forward, ms |  | memory | training step, ms |  | memory | the paper | memory",
        expected,
    )


def test_one_layer_over_4096_tokens_is_that_of_the_record():
    expected = []
    for title, model in LAYERS.items():
        timed = rows_of("bench-mixer-4096", model)
        row = [title, f"{ms(timed[128], 2)} ms, {gib(timed[128])}"]
        theirs = ["the paper's", f"{paper_mixer(model, 128)['gib']:.2f} GiB"]
        for key_dim in (64, 32):
            row += [f"{ms(timed[key_dim], 2)} ms", faster(timed[key_dim]), f"{timed[key_dim]['memory_ratio']:.3f}"]
            paper = paper_mixer(model, key_dim)
            theirs += ["", f"{paper['speedup']:.2f}x", f"{paper['gib'] / paper_mixer(model, 128)['gib']:.3f}"]
        expected += [row, theirs]
    check_rows(PAGE, "As the paper's script runs it", "layer | 128 | 64 |  | memory | 32 |  | memory", expected)


def test_one_layer_without_a_gate_is_that_of_the_record():
    expected = []
    for title, model in (("DeltaNet", "delta_net"), ("Gated DeltaNet, no gate", "gated_deltanet")):
        timed = rows_of("bench-mixer-no-gate", model)
        row = [title, f"{ms(timed[128], 2)} ms, {gib(timed[128])}"]
        for key_dim in (64, 32, 16):
            row += [faster(timed[key_dim]), f"{timed[key_dim]['memory_ratio']:.3f}"]
        expected.append(row)
    check_rows(
        PAGE, "bench-mixer-no-gate.json", "layer, 32 x 4096 | 128 | 64 | memory | 32 | memory | 16 | memory", expected
    )
    gated, without = (rows_of(name, "gated_deltanet")[128] for name in ("bench-mixer-4096", "bench-mixer-no-gate"))
    theirs = paper_mixer("gated_deltanet", 128)["gib"]
    check_says(PAGE, f"takes {gib(gated)} here and {theirs} in the paper: without it the peak is {gib(without)[:4]}.")


def test_what_is_said_of_layers_is_that_of_the_records():
    again = [
        faster(rows_of("bench-mixer-again", "delta_net", mode)[width])
        for mode in ("forward", "train")
        for width in (64, 32)
    ]
    inverses = [
        sum(kernel["ms"] for kernel in row["kernels"] if "inverse" in kernel["kernel"])
        for row in record("profile-mixer")["rows"]
    ]
    narrow = rows_of("bench-mixer", "delta_net", "forward")[32]
    check_says(
        PAGE,
        f"forward {again[0]} and {again[1]}, training step {again[2]} and {again[3]}",
        f"Of its {ms(narrow, 2)} ms at 2048 tokens, {inverses[-1]:.2f} are the inverses",
    )
    assert max(inverses) - min(inverses) < 0.01
    curve = {row["key_dim"]: row for row in widths() if row["model"] == "delta_net"}
    speeds = [
        rows_of(name, "delta_net", "forward")[32]["speedup"]
        for name in ("bench-mixer", "bench-mixer-4096", "bench-mixer-again")
    ]
    speeds += [curve[32]["speedup"], rows_of("bench-mixer-no-gate", "delta_net")[32]["speedup"]]
    check_says(PAGE, f"at key dim 32 is {min(speeds):.2f} to {max(speeds):.2f} times as fast here, not 1.60")
    measured = rows_of("bench-mixer", "delta_net", "forward")[96]
    gated, theirs = rows_of("bench-mixer-4096", "gated_deltanet")[128], paper_mixer("gated_deltanet", 128)
    check_says(PAGE, f"And a gated layer takes {gib(gated)} where the paper has {theirs['gib']:.2f}.")
    check_says(PAGE, f"({faster(curve[96])} here below and {faster(measured)} above for the DeltaNet forward at 96)")


def widths() -> list[dict]:
    return json.loads((ROOT / "src/slimstate/serving/curves/h200.json").read_text())["rows"]


def test_the_curve_of_widths_is_that_of_its_record():
    head, *body = table_after(PAGE, "## Which widths pay")
    for title, *cells in body:
        speedups = {row["key_dim"]: f"{row['speedup']:.2f}" for row in widths() if row["model"] == LAYERS[title]}
        assert cells == ["1", *(speedups[int(key_dim)] for key_dim in head[2:])]
        assert {int(key_dim) for key_dim in head[1:]} == {*speedups}
    around = {row["key_dim"]: faster(row) for row in widths() if row["model"] == "delta_net"}
    check_says(PAGE, f"88, and 72 and 80, are at {around[88]}, and {around[80]} to {around[72]} (DeltaNet).")


def test_whole_models_at_the_papers_size_are_those_of_the_records():
    expected = []
    for kind, prefix, key_dims in (
        ("delta", "delta_net", (128, 64, 32, 16)),
        ("gated", "gated_deltanet", (256, 128, 64, 32)),
    ):
        for size in ("370M", "1.3B"):
            model = f"{prefix}-{size.lower()}"
            timed = rows_of(f"bench-model-{kind}", model)
            row = [f"{'Gated ' if kind == 'gated' else ''}DeltaNet {size}", ms(timed[key_dims[0]], 1)]
            for key_dim in key_dims[1:]:
                row += [faster(timed[key_dim]), f"{timed[key_dim]['memory_ratio']:.2f}"]
            theirs = paper_speedups(model, "50", "75", "87.5")
            for key_dim, paper in zip(key_dims[1:], theirs, strict=True):
                assert abs(timed[key_dim]["speedup"] - float(paper[:-1])) < 0.03
            expected.append([*row, *theirs])
        settings = record(f"bench-model-{kind}")["settings"]
        assert (settings["batch"], settings["length"], settings["modes"]) == (32, 4096, ["prefill"])
    check_rows(
        PAGE,
        "## Whole models",
        "prefill of 32 x 4096 | uncut, ms | 50 % | memory | 75 % | memory | 87.5 % | memory | the paper: 50 %"
        " | 75 % | 87.5 %",
        expected,
    )
    check_says(PAGE, f"Its DeltaNet of 2.7B ({', '.join(paper_speedups('delta_net-2.7b', '50', '75', '87.5'))})")


def test_training_steps_of_whole_models_are_those_of_the_records():
    expected = []
    for title, name, model in (
        ("DeltaNet 1.3B", "bench-model", "delta_net-1.3b"),
        ("DeltaNet 2.7B", "bench-model", "delta_net-2.7b"),
        ("DeltaNet 370M, batch 32", "bench-train-370m", "delta_net-370m"),
    ):
        timed = rows_of(name, model, "train")
        row = [title, ms(timed[128], 0)]
        for key_dim in (64, 32):
            row += [ms(timed[key_dim], 0), faster(timed[key_dim]), f"{timed[key_dim]['memory_ratio']:.2f}"]
        expected.append([*row, *paper_speedups(model, "50", "75")])
    check_rows(
        PAGE,
        "Smaller batches, 8 x 2048",
        "training step | 128, ms | 64, ms |  | memory | 32, ms |  | memory | the paper: 64 | 32",
        expected,
    )
    quartiles = [f"{1000 * each:.0f}" for each in rows_of("bench-train-370m", "delta_net-370m")[32]["quartiles"]]
    small = sorted(row["seconds"] for row in rows_of("bench-model", "delta_net-370m", "train").values())
    check_says(
        PAGE,
        f"the quartiles at 32 are {quartiles[0]} and {quartiles[1]} ms",
        f"the 370M model takes {1000 * small[0]:.0f} to {1000 * small[-1]:.0f} ms at any key dim",
    )


def test_prefills_of_whole_models_are_those_of_the_records():
    expected = []
    for title, name, model, key_dims in (
        ("DeltaNet 370M", "bench-prefill", "delta_net-370m", (128, 64, 32)),
        ("DeltaNet 1.3B", "bench-prefill", "delta_net-1.3b", (128, 64, 32)),
        ("DeltaNet 2.7B", "bench-prefill", "delta_net-2.7b", (128, 64, 32)),
        ("Gated DeltaNet 370M, wide", "bench-prefill-gated", "gated_deltanet-370m", (256, 128, 64)),
        ("Gated DeltaNet 1.3B, wide", "bench-prefill-gated", "gated_deltanet-1.3b", (256, 128, 64)),
    ):
        timed = rows_of(name, model)
        row = [title, ms(timed[key_dims[0]], 1)]
        for key_dim in key_dims[1:]:
            row += [ms(timed[key_dim], 1), faster(timed[key_dim]), f"{timed[key_dim]['memory_ratio']:.2f}"]
        expected.append([*row, f"{1000 * timed[key_dims[0]]['eager_seconds']:.1f}"])
    check_rows(
        PAGE,
        "Prefill as a CUDA graph",
        "prefill of 8 x 2048 | uncut, ms | a half, ms |  | memory | a quarter, ms |  | memory | eager, uncut, ms",
        expected,
    )
    eager = [
        row["eager_seconds"]
        for name in ("bench-prefill", "bench-prefill-gated")
        for row in record(name)["rows"]
        if "370m" in row["model"]
    ]
    waits = [
        1000 * (row["eager_seconds"] - row["seconds"]) for row in rows_of("bench-prefill", "delta_net-1.3b").values()
    ]
    check_says(
        PAGE,
        f"({1000 * min(eager):.0f} to {1000 * max(eager):.0f} ms, in no order of key dim)",
        f"the DeltaNet of 1.3B in part ({min(waits):.0f} to {max(waits):.0f} ms)",
    )


def decoding(name: str, model: str, batch: int) -> dict[int, dict]:
    return {
        row["key_dim"]: row
        for row in record(name)["rows"]
        if (row["model"], row["batch"]) == (model, batch) and "seconds" in row
    }


def test_decoding_is_that_of_the_record():
    expected = []
    for batch in (1, 64, 256, 1024):
        for key_dim in (128, 64, 32):
            row = [str(batch) if key_dim == 128 else "", str(key_dim)]
            for model in ("delta_net-1.3b", "gated_deltanet-1.3b"):
                timed = decoding("bench-decode", model, batch)[key_dim]
                row += [ms(timed, 2), "1" if key_dim == 128 else faster(timed), f"{timed['tokens_per_second']:,.0f}"]
                row += [f"{100 * timed['share_of_copy_bandwidth']:.0f} %", f"{1000 * timed['roofline_seconds']:.2f}"]
            expected.append(row)
    check_rows(
        PAGE,
        "## Decoding",
        "B | key dim | DeltaNet 1.3B, ms |  | tokens/s | state traffic, of copying | roofline, ms"
        " | Gated 1.3B, ms |  | tokens/s | of copying | roofline, ms",
        expected,
    )


def test_what_is_said_of_decoding_is_that_of_the_records():
    made = record("bench-decode")
    most = {(each["model"], each["key_dim"]): f"{each['batch']:,}" for each in made["largest_batch"]}
    delta, gated = (
        [most[model, width] for width in (128, 64, 32)] for model in ("delta_net-1.3b", "gated_deltanet-1.3b")
    )
    step = {model: decoding("bench-decode", model, 1024) for model in ("delta_net-1.3b", "gated_deltanet-1.3b")}
    share = {
        model: [f"{timed[width]['seconds'] / timed[128]['seconds']:.2f}" for width in (64, 32)]
        for model, timed in step.items()
    }
    roof = {
        model: [f"{timed[width]['roofline_seconds'] / timed[128]['roofline_seconds']:.2f}" for width in (64, 32)]
        for model, timed in step.items()
    }
    full = decoding("bench-decode", "delta_net-1.3b", 4096)
    half, quarter = (f"{full[width]['tokens_per_second']:,.0f}" for width in (64, 32))
    (d, g), (dr, gr) = share.values(), roof.values()
    check_says(
        PAGE,
        f"Copying ran at {made['copy_bandwidth'] / 1e9:,.0f} GB/s",
        f"decodes {half} tokens a second at key dim 64 and {quarter} at 32",
        f"fits there: {decoding('bench-decode', 'gated_deltanet-1.3b', 4096)[32]['tokens_per_second']:,.0f}.",
        f"DeltaNet {delta[0]}, {delta[1]} and {delta[2]}; gated {gated[0]}, {gated[1]} and {gated[2]}.",
        f"takes {d[0]} of the time at 128, and at 32 {d[1]} of it; of the gated model {g[0]} and {g[1]}.",
        f"The roofline says {dr[0]} and {dr[1]} (gated {gr[0]} and {gr[1]})",
    )
    for timed, words in zip(step.values(), ("MiB in the DeltaNet", "MiB in the gated model"), strict=True):
        a, b, c = (f"{timed[width]['state_bytes'] / 2**20:g}" for width in (128, 64, 32))
        check_says(PAGE, f"{a}, {b} and {c} {words}")
    alone = [row["seconds"] for row in made["rows"] if row["batch"] == 1]
    eager = [row["eager_seconds"] for row in made["rows"] if "seconds" in row]
    check_says(
        PAGE,
        f"take {1000 * min(alone):.1f} to {1000 * max(alone):.1f} ms",
        f"the host needs {1000 * min(eager):.0f} ms and more",
    )


def test_decoding_of_other_sizes_is_that_of_the_record():
    most = {
        (each["model"], each["key_dim"]): f"{each['batch']:,}" for each in record("bench-decode-sizes")["largest_batch"]
    }
    for size in ("370M", "1.3B", "2.7B"):
        model = f"delta_net-{size.lower()}"
        timed = decoding("bench-decode-sizes", model, 1024)
        a, b, c = (ms(timed[width], 1) for width in (128, 64, 32))
        half, quarter = (f"{timed[width]['seconds'] / timed[128]['seconds']:.2f}" for width in (64, 32))
        shares = f"({half} and {quarter} of the time at 128)" if size == "370M" else f"({half}, {quarter})"
        check_says(
            PAGE,
            f"{size} {a}, {b} and {c} ms {shares}",
            f"{size} {most[model, 128]}, {most[model, 64]} and {most[model, 32]}",
        )


def test_decoding_of_the_published_shape_is_that_of_the_record():
    timed = decoding("bench-decode-gated", "gated_deltanet-1.3b", 1024)
    a, b, c = (f"{each['batch']:,}" for each in record("bench-decode-gated")["largest_batch"])
    check_says(
        PAGE,
        f"a step takes {ms(timed[256], 1)} ms at key dim 256, {ms(timed[128], 1)} ms at 128 ({faster(timed[128])}) and "
        f"{ms(timed[64], 1)} ms at 64 ({faster(timed[64])}); {a}, {b} and {c} sequences fit.",
    )


def test_where_a_decoding_step_goes_is_that_of_the_profile():
    parts, shares = [], []
    for row in record("profile-decode")["rows"]:
        groups = {"recurrent": 0.0, "nvjet": 0.0, "conv": 0.0, "": 0.0}
        for kernel in row["kernels"]:
            groups[next(name for name in groups if name in kernel["kernel"])] += kernel["ms"]
        parts.append([f"{each:.1f}" for each in groups.values()])
        states = 2 * 1024 * decoding("bench-decode", "delta_net-1.3b", 1024)[row["key_dim"]]["state_bytes"]
        shares.append(f"{100 * states / (groups['recurrent'] / 1000) / record('bench-decode')['copy_bandwidth']:.0f}")
    (state, products, convolutions, rest), narrow = parts
    step = decoding("bench-decode", "delta_net-1.3b", 1024)
    moved = [2 * 1024 * (step[width]["state_bytes"] + step[width]["convolution_bytes"]) for width in (128, 64)]
    ideal = [1000 * size / record("bench-decode")["copy_bandwidth"] for size in moved]
    left = [time + float(part[1]) + float(part[3]) for time, part in zip(ideal, parts, strict=True)]
    check_says(
        PAGE, f"({ideal[0]:.1f} and {ideal[1]:.1f} ms), with all else as it is, would be at {left[1] / left[0]:.2f};"
    )
    check_says(
        PAGE,
        f"{state} to {narrow[0]} ms, at {shares[0]} and {shares[1]} % of the copy bandwidth; the matrix products "
        f"go from {products} to {narrow[1]} ms, convolutions from {convolutions} to {narrow[2]}, all else",
        f"all else takes {rest}.",
    )


def test_calibration_is_that_of_the_record():
    expected = []
    for row in record("bench-calibrate")["rows"]:
        plain = row["method"] == "forward"
        expected.append(
            [
                row["method"],
                f"{row['seconds']:.3f}",
                "1" if plain else f"{row['times_forward']:.2f}",
                "" if plain else f"{row['selection_seconds']:.2f}",
                gib(row),
                "1" if plain else f"{row['memory_ratio']:.2f}",
            ]
        )
    check_rows(
        PAGE,
        "## Calibration",
        " | seconds | times the forward | choosing, s | GPU memory | times that of the forward",
        expected,
    )


def test_a_whole_prune_is_that_of_the_record():
    made, grad = record("pipeline"), record("pipeline-grad")
    plain, cut = made["forward"], made["drrqr"]
    parts = [plain[name] for name in ("loading", "reading text", "forward")]
    first = plain["seconds"] - sum(parts)
    turns = [", ".join(f"{each:.2f}" for each in side["all_seconds"]) for side in (plain, cut)]
    peaks = [[f"{side[name] / GIB:.2f} GiB" for name in ("gpu_peak_bytes", "host_peak_bytes")] for side in (plain, cut)]
    ratio, memory = cut["seconds"] / plain["seconds"], cut["gpu_peak_bytes"] / plain["gpu_peak_bytes"]
    sum_of_parts = " + ".join(f"{each:.2f}" for each in parts)
    expected = [
        [
            "loading, reading the text, forward",
            f"{plain['seconds']:.2f}: {sum_of_parts}, and {first:.2f} for a first, shorter forward",
        ],
        ["`prune --method drrqr`", f"{cut['seconds']:.2f}, {ratio:.2f} x"],
    ]
    expected[0] += [turns[0], *peaks[0]]
    expected[1] += [turns[1], f"{peaks[1][0]}, {memory:.2f} x", peaks[1][1]]
    check_rows(PAGE, "## A whole prune", " | seconds | all three | GPU memory | host memory", expected)
    by_turn = [f"{b / a:.2f}" for a, b in zip(plain["all_seconds"], cut["all_seconds"], strict=True)]
    waiting = cut["before reading the weights for their fingerprint"]
    calibrating = cut["calibrating"] + waiting
    without = plain["seconds"] - plain["reading text"]
    names = list(cut)
    last = slice(names.index("reading the weights for their fingerprint"), names.index("host_peak_bytes"))
    after = sum(cut[name] for name in names[last])
    check_says(PAGE, f"all after it {after:.2f}.")
    check_says(
        PAGE,
        f"Turn by turn that is {by_turn[0]}, {by_turn[1]} and {by_turn[2]} x.",
        f"Of the {cut['seconds']:.2f} s, reading takes {cut['reading']:.2f}, comparing with the stock class "
        f"{cut['comparing the tensors with the stock class']:.2f}, loading {cut['loading the model']:.2f}, calibration "
        f"{calibrating:.2f} ({cut['calibrating']:.2f}, and {waiting:.2f} until the GPU is done)",
        f"where the forward passes take {plain['forward'] + first:.2f}",
        f"alone it is {cut['seconds'] / without:.2f} x, of both {(cut['seconds'] - cut['reading']) / without:.2f} x.",
        f"took {grad['grad']['seconds']:.1f} s and {grad['grad']['gpu_peak_bytes'] / GIB:.2f} GiB where loading, text "
        f"and forward took {grad['forward']['seconds']:.1f} s",
    )


def test_recurrences_on_a_cpu_are_those_of_the_record():
    made, expected = record("recurrences"), []
    tokens, gained = made["length"] / 1000, {}
    for row in made["rows"]:
        seconds, peak = row["seconds"], row["peak_bytes"]
        cells = [f"{row['family']}, {row['width']}"]
        for way in ("forward", "with gradients"):
            naive, chunked, plain = (
                seconds[f"{kind}, {way}"] for kind in ("token by token", "chunked", "plain products")
            )
            cells += [
                f"{tokens / naive:.1f}",
                f"{tokens / chunked:.1f}",
                f"{naive / chunked:.0f}x",
                f"{tokens / plain:.0f}",
            ]
            gained[row["family"], row["width"], way] = naive / chunked
        cells += [f"{peak[f'chunked, {way}'] / 2**20:.1f}" for way in ("forward", "with gradients")]
        expected.append([*cells, f"{row['inputs'] / 2**20:.1f}"])
        assert row["error"] < 1e-4
    check_rows(
        PAGE,
        "records/recurrences.json",
        "recurrence, width | token by token, thousand tokens/s | chunked |  | plain products"
        " | token by token, with gradients | chunked |  | plain products | peak MiB, forward | with gradients"
        " | inputs",
        expected,
    )
    for way in ("forward", "with gradients"):
        least = min(gain for (*_, each), gain in gained.items() if each == way)
        check_says(PAGE, f"{int(least)} times token by token or more {way}")


def test_the_memory_of_a_training_step_is_that_of_the_record():
    made, expected = record("activations")["rows"], []
    for name in dict.fromkeys(row["type"] for row in made):
        rows = {row["length"]: row for row in made if row["type"] == name}
        sizes = [f"{rows[length][kind] / 2**20:.1f}" for kind in ("activations", "peak") for length in (512, 4096)]
        expected.append([name, *sizes, *(f"{row['peak'] / row['activations']:.2f}" for row in rows.values())])
    check_rows(
        PAGE,
        "records/activations.json",
        "layer | activations at 512, MiB | at 4096 | peak at 512, MiB | at 4096 | peak over activations, 512"
        " | 1024 | 2048 | 4096",
        expected,
    )
    most = max(row["peak"] / row["activations"] for row in made)
    assert most < 2
    check_says(PAGE, f"The peak is at most {most:.2f} times the activations")


def test_steps_of_whole_models_on_a_cpu_are_those_of_the_record():
    expected = []
    groups = (
        "products of layers", "by element", "products of chunks", "triangular solves", "convolutions", "copies", "loss",
        "AdamW", "Python and autograd",
    )  # fmt: skip
    for row in record("steps")["rows"]:
        for kind in ("forward", "training step"):
            now, before = (row["seconds"][version][kind][0] for version in ("now", "before"))
            for version, title, times in (
                ("now", f"{row['model']}, {kind}", [f"{now:.3f}", f"{before / now:.2f}x"]),
                ("before", "the same in 0.1", [f"{before:.3f}", ""]),
            ):
                shares = row["shares"][version][kind]
                expected.append([title, *times, *(f"{100 * shares.get(x, 0):.0f} %" for x in groups)])
    head = f"model, work | seconds | gain | {' | '.join(groups)}"
    check_rows(PAGE, "records/steps.json", head, expected)
