"""MEASURED.md: what is on no other page."""

from __future__ import annotations

from typing import Any

from tables.layout import grid, pairs, power, record, sweep, table

KINDS = {"Gram matrices": "gram", "inputs": "input", "gradients": "gradient"}


def _forgotten() -> list[dict[str, Any]]:
    """Return the bundled model and its cuts: perplexities over those of the uncut model, and recall with its error."""
    cuts = [record(f"bundled-eval-{key_dim}") for key_dim in (64, 32)]
    uncut = cuts[0]["baseline"]
    rows = []
    for model in (uncut, *cuts):
        recall, points = model["associative_recall"], model["associative_recall"]["points"]
        rows.append(
            {
                "model": "uncut" if model is uncut else f"key dim {model['key_dim']}",
                "ratio": model["word_perplexity"] / uncut["word_perplexity"],
                "recall": recall["mean"],
                "error": sum(point["stderr"] ** 2 for point in points) ** 0.5 / len(points),
            }
        )
    return rows


def _epsilon() -> list[dict[str, Any]]:
    kinds = {"left alone": sweep("sweep-delta_net-30m-kept"), "corrected": sweep("sweep-delta_net-30m-main")}
    return [
        {"epsilon": title, **{method: rows[method, "kq", 32]["word_ratio"] for method in ("l1", "drrqr")}}
        for title, rows in kinds.items()
    ]


def _difference(family: str, place: tuple[str, str]) -> str:
    dtype, kind = place
    numbers = record("devices")["families"][family][dtype]
    return power(max(number for name, number in numbers.items() if KINDS[kind] in name))


def _selection() -> list[dict[str, Any]]:
    measured = record("selection")
    return [
        {"way": "head by head", "seconds": measured["paper_seconds"]},
        {"way": "slimstate, all heads in one batch", "seconds": measured["slimstate_seconds"]},
    ]


def _peaks() -> list[dict[str, Any]]:
    """Return the peak memory of what runs on a CPU, in GB."""
    memory = record("memory")
    rows = [
        {"run": f"calibration with {windows} windows of {memory['length']} tokens", "gb": kib * 1024 / 1e9}
        for windows, kib in memory["peak_kib"].items()
    ]
    for large in map(record, ("large", "large-fp8", "large-fp8-random")):
        size = f"{large['checkpoint_bytes'] / 1e9:.2f} GB{' in FP8' * large.get('fp8', False)}"
        run = f"cut of a checkpoint of {size} in {large['shards']} shards, by `{large['method']}`"
        rows.append({"run": run, "gb": large["peak_bytes"] / 1e9, **large})
    return rows


TABLES = {
    "forgotten": table(
        {
            "model": "{model}",
            "perplexity per word": "{ratio:.2f}x",
            "names recalled": "{recall:.2f}",
            "standard error": "{error:.2f}",
        },
        _forgotten(),
    ),
    "epsilon": table({"`norm_eps`": "{epsilon}", "`l1`": "{l1:.2f}x", "`drrqr`": "{drrqr:.2f}x"}, _epsilon()),
    "selection": table({"": "{way}", "seconds": "{seconds:.2f}"}, _selection()),
    "memory": table({"": "{run}", "peak, GB": "{gb:.2f}", "seconds": "{seconds:.0f}"}, _peaks()),
    "devices": grid(
        ("family",),
        [(family,) for family in sorted(record("devices")["families"])],
        pairs(dict.fromkeys(("float32", "bfloat16"), tuple(KINDS))),
        _difference,
    ),
}
NUMBERS = {"same-choice": record("selection")["same_choice"].split(" of ")[0]}
