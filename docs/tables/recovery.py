"""The part of EXPERIMENTS.md on recovery, and the numbers of guides/recover.md."""

from __future__ import annotations

import statistics
from typing import Any

from tables.layout import METHODS, Row, grid, percent, recall_scores, record, sweep, table

MODELS = {"DeltaNet": "delta_net-30m", "Gated DeltaNet": "gated_deltanet-31m"}
TITLES = {"delta_net": "DeltaNet", "gated_deltanet": "Gated DeltaNet"}
PRINTED = record("reconstruction-30m")["recovered"]  # its own record was lost
RUNS: dict[str, Row] = {run["run"]: run for run in record("recovery")} | {
    PRINTED["run"]: {**PRINTED, "model_type": "delta_net", "cut": {"method": "drrqr"}, "measured": PRINTED}
}
CUTS = {model_type: sweep(f"sweep-{MODELS[title]}-main") for model_type, title in TITLES.items()}
TUNED = "gated tuned control"
# the letter of the settings, the run, and the run of the uncut model that it is compared with
RECOVERIES = (
    ("A", "long reconstructed-64", "long control"),
    ("A", "long s-wanda reconstructed-64", "long control"),
    ("B", "reconstructed-64", "control"),
    ("B", "reconstructed-32", "control"),
    ("C", "s-wanda reconstructed-64", "s-wanda control"),
    ("D", "mixers reconstructed-64", "mixers control"),
    ("E", "gated long reconstructed-64", "gated long control"),
    ("F", "gated reconstructed-64", "gated control"),
    ("G", "gated no teacher 1e-3 reconstructed-64", "gated no teacher 1e-3 control"),
    ("H", "gated no teacher 2e-3 reconstructed-64", "gated no teacher 2e-3 control"),
    ("I", "taught reconstructed-64", "tuned control"),
    ("I", "gated taught reconstructed-64", TUNED),
    ("I", "gated taught s-wanda reconstructed-64", TUNED),
    ("J", "gated taught 1e-3 s-wanda reconstructed-64", TUNED),
    ("K", "gated taught 4e-3 s-wanda reconstructed-64", TUNED),
    ("L", "gated taught seed 1 reconstructed-64", TUNED),
    ("L", "gated taught seed 1 s-wanda reconstructed-64", TUNED),
)
TEACHERS = {"G": "none", "H": "none"} | dict.fromkeys("IJKL", "the control")
TEXTS = {"WikiText-2": "wikitext2", "FineWeb-Edu": "fineweb_edu", "Wikipedia": "calibration"}
NATS = {row["run"]: row["nats"] for row in record("control-teaches")["rows"]}
# what was measured on three texts, by the names in the record
ON_TEXTS = {
    "Gated DeltaNet": {
        "cut by `drrqr`": "cut drrqr",
        "cut by `s-wanda`": "cut s-wanda",
        "cut by `drrqr`, reconstructed": "reconstructed drrqr",
        "cut by `s-wanda`, reconstructed": "reconstructed s-wanda",
        "control, the teacher": TUNED,
        "I, `drrqr`": "gated taught reconstructed-64",
        "I, `s-wanda`": "gated taught s-wanda reconstructed-64",
        "J, `s-wanda`": "gated taught 1e-3 s-wanda reconstructed-64",
        "K, `s-wanda`": "gated taught 4e-3 s-wanda reconstructed-64",
        "L, `drrqr`": "gated taught seed 1 reconstructed-64",
        "L, `s-wanda`": "gated taught seed 1 s-wanda reconstructed-64",
        "uncut, taught as in I": "gated taught control",
        "uncut, taught as in K": "gated taught 4e-3 control",
        "uncut, taught as in L": "gated taught seed 1 control",
    },
    "DeltaNet": {
        "cut by `drrqr`": "cut DeltaNet",
        "cut by `drrqr`, reconstructed": "reconstructed DeltaNet",
        "control, the teacher": "tuned control",
        "I, `drrqr`": "taught reconstructed-64",
        "uncut, taught as in I": "taught control",
    },
}
# recovered cuts on three texts: the model, the run as titled above, the cut it comes from, the uncut model taught alike
TAUGHT = (
    ("Gated DeltaNet", "I, `drrqr`", "cut by `drrqr`", "uncut, taught as in I"),
    ("Gated DeltaNet", "I, `s-wanda`", "cut by `s-wanda`", "uncut, taught as in I"),
    ("Gated DeltaNet", "K, `s-wanda`", "cut by `s-wanda`", "uncut, taught as in K"),
    ("Gated DeltaNet", "L, `drrqr`", "cut by `drrqr`", "uncut, taught as in L"),
    ("Gated DeltaNet", "L, `s-wanda`", "cut by `s-wanda`", "uncut, taught as in L"),
    ("DeltaNet", "I, `drrqr`", "cut by `drrqr`", "uncut, taught as in I"),
)
RECALLED = {
    "uncut": (128, "uncut", "uncut"),
    "control, the teacher": (128, TUNED, "tuned control"),
    "uncut, taught as in L": (128, "gated taught seed 1 control", ""),
    "key dim 64 by `drrqr`, recovered": (64, "gated taught seed 1 reconstructed-64", "taught reconstructed-64"),
    "key dim 64 by `s-wanda`, recovered": (64, "gated taught seed 1 s-wanda reconstructed-64", ""),
}
OPTIONS = (
    "lora 2e-3",
    "all-linear r64 2e-3",
    "full 5e-4",
    "full 1e-3",
    "full 2e-3",
    "full 1e-3 kd 4",
    "full 1e-3 kd 16",
)
DEFAULTS = (
    "lora 1e-4 kd 1", "lora 1e-3 kd 4", "mixers 5e-4 kd 4", "mixers 1e-3 kd 4", "full 5e-4 kd 4", "full 1e-3 kd 4",
)  # fmt: skip


def nats(run: str) -> Row:
    return RUNS[run]["measured"]["nats"]


def closed(before: float, after: float, target: float, digits: int = 1) -> str:
    """Return the share of the gap between `before` and `target` that was closed."""
    return percent((before - after) / (before - target), digits)


def _recovery(letter: str, name: str, control: str) -> dict[str, Any]:
    run, target = RUNS[name], nats(control)["after"]
    method, key_dim = run["cut"]["method"], run["key_dim"]
    cut = CUTS[run["model_type"]][method, "kq", key_dim]["nats_per_token"]
    return {
        "letter": letter,
        "model": TITLES[run["model_type"]],
        "method": method,
        "key_dim": key_dim,
        "cut": cut,
        "reconstructed": nats(name)["before"],
        "recovered": nats(name)["after"],
        "control": target,
        "closed": closed(cut, nats(name)["after"], target),
    }


def _settings(letter: str, name: str) -> dict[str, Any]:
    """Return the row of a letter: its teacher, its tokens and its options."""
    settings, tokens = RUNS[name]["settings"], RUNS[name]["tokens"]
    names = ["lr", "min_lr", "kd_weight", "temperature", "batch_size", "length", "steps", "seed"]
    used = [name for name in names if name != "temperature" or settings["kd_weight"]]
    used = [name for name in used if name != "seed" or settings["seed"]]
    teacher = TEACHERS.get(letter, "the uncut model")
    return {"letter": letter, "teacher": teacher, "tokens": tokens / 1e6, "options": _flags(name, *used)}


def _flags(run: str, *names: str) -> str:
    """Return options of a run as they are typed, what is trained and then these settings, each as code of its own."""
    settings = RUNS[run]["settings"]
    trained = "--full" if settings["full"] else "--mixers" if settings["mixers"] else "--lora"
    if settings["lora_targets"]:
        trained = f"--lora-targets {settings['lora_targets']} --lora-rank {settings['lora_rank']}"
        trained += f" --lora-alpha {settings['lora_alpha']}"
    values = {name: _rate(settings[name]) if name.endswith("lr") else f"{settings[name]:g}" for name in names}
    options = " ".join([trained, *(f"--{name.replace('_', '-')} {value}" for name, value in values.items())])
    return f"`{options.replace(' --', '` `--')}`"


def _rate(number: float) -> str:
    """Return a learning rate as it is typed, such as 2.5e-5."""
    return f"{number:.1e}".replace(".0e", "e").replace("e-0", "e-")


def _shares(model: str, title: str, cut: str, taught: str) -> dict[str, str]:
    """Return what a recovered cut closed of the gap to its teacher on each text, and to an uncut model taught alike."""
    before, after, control, also = (
        NATS[ON_TEXTS[model][name]] for name in (cut, title, "control, the teacher", taught)
    )
    shares = {name: closed(before[key], after[key], control[key]) for name, key in TEXTS.items()}
    key = TEXTS["WikiText-2"]
    return {"model": model, "run": title, **shares, "taught": closed(before[key], after[key], also[key])}


def _recall() -> dict[tuple[str, int, str], list[float]]:
    """Return for every model the score of each seed."""
    measured = record("recall")
    return {
        (row["model"], row["key_dim"], row["what"]): recall_scores(row["right"], measured["questions"])
        for row in measured["rows"]
    }


def _recalled(title: str) -> dict[str, str]:
    key_dim, *names = RECALLED[title]
    known = [RECALL.get((model, key_dim, name)) for model, name in zip(reversed(MODELS.values()), names, strict=True)]
    gated, plain = ("" if seeds is None else percent(statistics.mean(seeds), 1) for seeds in known)
    return {"model": title, "gated": gated, "plain": plain}


def _by_method(key_dim: int, method: str, column: str) -> str:
    run = "drrqr-64 full 1e-3 kd 4" if (method, key_dim) == ("drrqr", 64) else f"s-{method}-{key_dim}"
    if column == "closed":
        return closed(nats(run)["before"], nats(run)["after"], nats("s-control")["after"], 0)
    return f"{nats(run)[column]:.4f}"


def _default(options: str, model: str) -> str:
    run = f"{model} {BY_FLAGS[options]}".replace("DeltaNet full 1e-3", "drrqr-64 full 1e-3")
    return closed(nats(run)["before"], nats(run)["after"], nats(run)["uncut"], 0) if run in RUNS else ""


BY_FLAGS = {_flags(f"bundled {name}", "lr", "min_lr", "kd_weight"): name for name in DEFAULTS}
LETTERS = {letter: name for letter, name, _ in reversed(RECOVERIES) if "settings" in RUNS[name]}
SHARES = {(model, run): _shares(model, run, *more) for model, run, *more in TAUGHT}
RECALL = _recall()
ROWS = [_recovery(*recovery) for recovery in RECOVERIES]
TABLES = {
    "recoveries": table(
        {
            "model": "{model}",
            "cut by": "`{method}`",
            "key dim": "{key_dim}",
            "settings": "{letter}",
            "cut": "{cut:.4f}",
            "reconstructed": "{reconstructed:.4f}",
            "recovered": "{recovered:.4f}",
            "control": "{control:.4f}",
            "closed": "{closed}",
        },
        ROWS,
    ),
    "recovery-settings": table(
        {"": "{letter}", "teacher": "{teacher}", "tokens": "{tokens:.1f}M", "options of `recover`": "{options}"},
        [_settings(*pair) for pair in sorted(LETTERS.items())],
    ),
    "recovery-texts": table(
        {"model": "{model}", "": "{title}", **{title: f"{{{key}:.4f}}" for title, key in TEXTS.items()}},
        [
            {"model": model, "title": title, **NATS[name]}
            for model, runs in ON_TEXTS.items()
            for title, name in runs.items()
        ],
    ),
    "recovery-shares": table(
        {
            "model": "{model}",
            "run": "{run}",
            **{title: f"{{{title}}}" for title in TEXTS},
            "WikiText-2, to an uncut model taught alike": "{taught}",
        },
        SHARES.values(),
    ),
    "recovery-recall": table(
        {"names recalled": "{model}", "Gated DeltaNet, L": "{gated}", "DeltaNet, I": "{plain}"},
        [_recalled(title) for title in RECALLED],
    ),
    "recovery-methods": grid(
        ("key dim", "method"),
        [(key_dim, method) for key_dim in (64, 32) for method in METHODS[::-1]],
        ("before", "after", "closed"),
        _by_method,
    ),
    "recovery-options": table(
        {"options": "{options}", "after": "{after:.4f}", "closed": "{closed}"},
        [
            {
                "options": _flags(run, "lr", "min_lr", "kd_weight"),
                "after": nats(run)["after"],
                "closed": closed(nats(run)["before"], nats(run)["after"], nats(run)["uncut"], 0),
            }
            for run in (f"drrqr-64 {name}" for name in OPTIONS)
        ],
    ),
    "recovery-defaults": grid(
        ("options",),
        [(options,) for options in BY_FLAGS],
        ("DeltaNet", "bundled", "hybrid", "Gated DeltaNet"),
        _default,
    ),
}
