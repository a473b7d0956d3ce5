"""The part of EXPERIMENTS.md on recovery, and the numbers of guides/recover.md."""

from __future__ import annotations

from typing import Any

from tables.layout import METHODS, Row, large, only, record, select, table

MODELS = {"DeltaNet": "delta_net-30m", "Gated DeltaNet": "gated_deltanet-31m"}
SHORT_NAMES = {"delta": "DeltaNet", "gated": "Gated DeltaNet"}
SHORT, LONG, LONGER = 8_192_000, 19_660_800, 32_768_000  # tokens
TITLES = {"delta_net": "DeltaNet", "gated_deltanet": "Gated DeltaNet"}
SETTINGS = record("recovery-settings")["rows"]


def _run(result: Row) -> Row:
    """Return what the tables select recoveries by, and what was measured; the control has no method."""
    title, cut, measured = TITLES[result["model_type"]], result["cut"] or {}, result["measured"]
    is_uncut = result["teacher"]["model"] == MODELS[title]
    return {
        "model": title,
        "method": cut.get("method"),
        "key_dim": result["key_dim"],
        "reconstructed": bool(cut.get("reconstructed")),
        "trained": "all weights" if result["settings"]["full"] else "adapters",
        "teacher": "the uncut model" if is_uncut else "the control",
        "tokens": result["tokens"],
        "word_perplexity": measured["word_perplexity"],
        "recall": {when: share for when, (share, _) in measured["recall"].items()},
        "recall_errors": [error for _, error in measured["recall"].values()],
    }


RUNS = [_run(result) for result in record("recovery")]


def run(title: str, **fields: object) -> Row:
    """Return the one recovery with these values; without a method the control, the uncut model trained alike."""
    return only(RUNS, model=title, **{"method": None, "trained": "all weights", "tokens": SHORT, **fields})


def _cells(cut: Row) -> dict[str, Any]:
    """Return a recovery with its perplexities, also over that of the control, and its recall in percent."""
    control, words = run(cut["model"], tokens=cut["tokens"]), cut["word_perplexity"]
    return {
        "model": cut["model"],
        "key_dim": cut["key_dim"],
        "method": f"`{cut['method']}`{', reconstructed' * cut['reconstructed']}",
        **words,
        "first": large(words["before"]),
        "control": control["word_perplexity"]["after"],
        "over_control": words["after"] / control["word_perplexity"]["after"],
        **{f"recall_{when}": 100 * share for when, share in cut["recall"].items()},
        "recall_control": 100 * control["recall"]["after"],
    }


def _short(title: str) -> list[dict[str, Any]]:
    """Return the recoveries on few tokens, from the largest key dim and the least perplexity on."""
    cuts = select(RUNS, model=title, tokens=SHORT, trained="all weights")
    rows = [_cells(cut) for cut in cuts if cut["method"] is not None]
    return sorted(rows, key=lambda row: (-row["key_dim"], row["after"]))


def _reconstructed() -> list[dict[str, Any]]:
    """Return the recoveries of reconstructed halves, from the cut before its reconstruction on."""
    rows = []
    for cut in select(RUNS, method="drrqr", key_dim=64, reconstructed=True):
        plain = run(cut["model"], method="drrqr", key_dim=64, reconstructed=False)["word_perplexity"]
        more = {"tokens": cut["tokens"] / 1e6, "cut": plain["before"], "uncut": plain["uncut"]}
        rows.append({**_cells(cut), **more, "teacher": cut["teacher"]})
    return rows


ROWS = [row for title in MODELS for row in _short(title)]
RECONSTRUCTED = _reconstructed()
TABLES = {
    "recoveries": table(
        {
            "model": "{model}",
            "key dim": "{key_dim}",
            "cut by": "{method}",
            "before": "{first}",
            "after": "{after:.1f}",
            "over the control": "{over_control:.3f}",
            "recall before": "{recall_before:.0f} %",
            "recall after": "{recall_after:.0f} %",
        },
        ROWS,
    ),
    "results-recovery": table(
        {
            "word perplexity": "{model}",
            "teacher": "{teacher}",
            "tokens": "{tokens:.0f}M",
            "uncut": "{uncut:.1f}",
            "cut": "{cut:.1f}",
            "reconstructed": "{before:.1f}",
            "recovered": "{after:.1f}",
            "control": "{control:.1f}",
            "recall, recovered": "{recall_after:.0f} %",
            "recall, control": "{recall_control:.0f} %",
        },
        RECONSTRUCTED,
    ),
    "recovery-settings": table(
        {"options": "{options}", "after": "{after:.1f}", "over the uncut model": "{ratio:.3f}"},
        [
            {"options": f"`{row['options']}`", **words, "ratio": words["after"] / words["uncut"]}
            for row in sorted(SETTINGS, key=lambda row: -row["word_perplexity"]["after"])
            for words in [row["word_perplexity"]]
        ],
    ),
}


def _words(title: str, when: str = "after", **fields: object) -> str:
    """Return the word perplexity of a recovery, or of a control, before or after it."""
    return f"{run(title, **fields)['word_perplexity'][when]:.1f}"


def _recall(*methods: str, when: str) -> str:
    """Return the recall of halves of the DeltaNet by these methods, in percent: a number, or a range."""
    cuts = [run("DeltaNet", method=method, key_dim=64, reconstructed=False) for method in methods]
    ends = sorted({f"{100 * cut['recall'][when]:.0f}" for cut in cuts})
    return ends[0] if len(ends) == 1 else f"{ends[0]}-{ends[-1]}"


def _spread(key_dim: int) -> str:
    """Return by how many percent the four methods that measure something differ on the DeltaNet after a recovery."""
    cuts = [run("DeltaNet", method=method, key_dim=key_dim, reconstructed=False) for method in METHODS[1:]]
    ends = [cut["word_perplexity"]["after"] for cut in cuts]
    return f"{100 * (max(ends) / min(ends) - 1):.1f}"


HALF = {"method": "drrqr", "key_dim": 64, "reconstructed": False}
BACK = {**HALF, "reconstructed": True}
TAUGHT = {row["model"]: row for row in RECONSTRUCTED if row["teacher"] == "the control"}
NUMBERS = {
    **{f"recover-uncut-{name}": _words(title, "before") for name, title in SHORT_NAMES.items()},
    **{f"recover-control-{name}": _words(title) for name, title in SHORT_NAMES.items()},
    **{f"taught-control-{name}": _words(title, tokens=LONG) for name, title in SHORT_NAMES.items()},
    **{f"longer-{name}": _words(title, tokens=LONGER) for name, title in SHORT_NAMES.items()},
    "recover-reconstructed": _words("DeltaNet", "before", **BACK),
    "recover-delta": _words("DeltaNet", **BACK),
    "recover-delta-cut": _words("DeltaNet", **HALF),
    "recover-adapters": _words("DeltaNet", **{**HALF, "trained": "adapters"}),
    "recover-gated": _words("Gated DeltaNet", **HALF),
    "recover-over": f"{100 * (_cells(run('DeltaNet', **BACK))['over_control'] - 1):.1f}",
    **{f"taught-{name}": f"{TAUGHT[title]['after']:.1f}" for name, title in SHORT_NAMES.items()},
    "taught-recall-gated": f"{TAUGHT['Gated DeltaNet']['recall_after']:.0f}",
    "taught-recall-control-gated": f"{TAUGHT['Gated DeltaNet']['recall_control']:.0f}",
    **{f"recover-spread-{key_dim}": _spread(key_dim) for key_dim in (64, 32)},
    **{f"recall-{name}": f"{100 * run(title)['recall']['before']:.0f}" for name, title in SHORT_NAMES.items()},
    "recall-norms": _recall("l1", "s-wanda", when="before"),
    "recall-norms-after": _recall("l1", "s-wanda", when="after"),
    "recall-ranks": _recall("grad", "drrqr", when="before"),
    "recall-ranks-after": _recall("grad", "drrqr", when="after"),
    "recover-recall-error": f"{100 * max(error for row in RUNS for error in row['recall_errors']):.1f}",
}
