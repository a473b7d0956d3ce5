"""Numbers on the pages about recovered models are those of the records they name."""

from __future__ import annotations

import math
import statistics

from places import ROOT
from reading_pages import (
    EXPERIMENTS,
    METHODS,
    asked_to_remember,
    check_rows,
    check_says,
    found,
    record,
    remembered,
    standard_errors,
    sweeps,
)


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
        f" {first.split()[0]} and {second} with two seeds of the recovery;"
        f" cut by `s-wanda` {wanda.split()[0]} and {again}.",
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
        f"The DeltaNet's ends {after['long reconstructed-64'] - after['taught reconstructed-64']:.3f} below the one",
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
    seeds, questions = asked_to_remember()
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
    unusual = {"temperature": settings["kd_weight"] and settings["temperature"] != 2, "seed": settings["seed"]}
    return [" ".join(words), *(f"--{name} {settings[name]:g}" for name, is_told in unusual.items() if is_told)]


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
