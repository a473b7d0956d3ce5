"""RECONSTRUCT.md: what training the cut layers brings."""

from __future__ import annotations

import statistics
from typing import Any

from tables.layout import GIB, RECORDS, grid, only, pairs, percent, record, select, sweep, table
from tables.recovery import MODELS, RECALL, recall_errors

MEASURED = record("reconstruction-30m")
KEY_DIMS = (64, 32, 16)
CUTS = {title: sweep(f"sweep-{name}-main") for title, name in MODELS.items()}
# rows of the record, by what the command was given
WAYS: dict[str, dict[str, Any]] = {
    "`--reconstruct` (500 steps)": {"way": "--reconstruct", "steps": 500},
    "`--reconstruct-steps 600`": {"way": "--reconstruct", "steps": 600},
    "600 steps and `--distill 300`": {"way": "--distill 300"},
}
WEIGHTS = {
    "all tokens alike (`drrqr`)": "all alike",
    "by the gradient": "lengths",
    "by the squared gradient (`drrqr-weighted`)": "squares",
}
VARIANTS = (
    "behind the layer",
    "behind the mixer",
    "behind the mixer, channels chosen in the uncut model",
    "behind the mixer, errors relative to the residual stream",
    "behind the mixer, every token counts alike",
)


def gained(way: str, model: str, key_dim: int) -> float:
    """Return the nats per token over the uncut model on WikiText-2."""
    if way == "cut only":
        return CUTS[model]["drrqr", "kq", key_dim]["nats_over_uncut"]
    row = only(MEASURED["rows"], model=MODELS[model], key_dim=key_dim, **WAYS[way])
    return row["nats_over_uncut"]["wikitext2"]


def back(way: str) -> list[float]:
    """Return the share of the loss that came back, for both models and all key dims."""
    return [1 - gained(way, *place) / gained("cut only", *place) for place in PLACES]


def _weighted(title: str, place: tuple[str, int]) -> str:
    model, key_dim = place
    rows = select(MEASURED["drrqr_weighted"], model=MODELS[model], key_dim=key_dim)
    (row,) = (row for row in rows if row["tokens_count_by"].startswith(WEIGHTS[title]))
    return f"{row['nats_over_uncut']:.3f}"


def _variant(way: str, model: str) -> str:
    row = only(MEASURED["rows"], model=MODELS[model], key_dim=32, way=way, steps=400, learning_rate=1e-3)
    return f"{row['nats_over_uncut']['wikitext2']:.3f}"


def _recalled(model: str, key_dim: int, what: str) -> str:
    """Return the names recalled: of the Gated DeltaNet over twenty seeds, of the DeltaNet from one."""
    name = "uncut" if key_dim == 128 else what
    if key_dim == 128 and what == "reconstructed":
        return ""
    if model == "Gated DeltaNet":
        return percent(statistics.mean(RECALL[MODELS[model], key_dim, name]), 1)
    return percent(only(MEASURED["associative_recall"], model=MODELS[model], key_dim=key_dim, what=name)["mean"], 1)


def _bundled() -> list[dict[str, Any]]:
    """Return a row for each key dim and command on the bundled model, with the share of the loss that came back."""
    measured = record("bundled-reconstruction")
    rows = []
    for row in measured["rows"]:
        start = f"slimstate prune demo/model --key-dim {row['key_dim']} --data demo/calibration.txt"
        options = row["command"].removeprefix(start).removesuffix(" --out SLIM").strip()
        lost = row["nats_per_token"] - measured["uncut"]
        cut = only(measured["rows"], command=f"{start} --out SLIM")["nats_per_token"] - measured["uncut"]
        more = {"back": percent(1 - lost / cut), "minutes": row["seconds"] / 60} if options else {}
        rows.append(
            {"key_dim": row["key_dim"], "options": f"`{options}`" if options else "cut only", "lost": lost, **more}
        )
    return sorted(rows, key=lambda row: -row["key_dim"])


def _memory() -> list[dict[str, Any]]:
    measured = record("large-reconstruction")
    parts, peak = measured["first_layer_bytes"], measured["peak_bytes"]
    sizes = {
        "program, libraries and text, before the first layer": parts["before_the_first_layer"],
        "experts of one layer, in the bfloat16 of the files": parts["experts"],
        "its other weights, in float32": parts["other_weights"],
        "six copies of what is trained: weights, gradients, two moments of Adam, the cut, the best so far": 6
        * parts["trained_weights"],
    }
    sizes["activations, a few experts in float32, and memory that the allocator keeps"] = peak - sum(sizes.values())
    return [{"part": part, "gb": size / 1e9} for part, size in {**sizes, "peak": peak}.items()]


def _production() -> str:
    """Return what reconstructions at full width took, or how to measure them."""
    if not (RECORDS / "production.json").is_file():
        return "Not measured yet."
    measured = record("production")
    rows = []
    for name, model in measured["models"].items():
        part, whole = model["reconstruct"], model["estimate"]
        row = {"model": name, "layers": f"{model['all']['linear']} + {model['all']['other']}"}
        for kind in ("linear", "other"):
            seconds = [layer["seconds"] for layer in part["layers"] if layer["kind"] == kind]
            row |= {kind: statistics.median(seconds)} if seconds else {}
        peak = max(layer["gpu_peak_bytes"] or 0 for layer in part["layers"])
        row |= {"gpu": peak / GIB} if peak else {}
        rows.append({**row, "host": part["host_peak_bytes"] / GIB, "minutes": whole["total"] / 60})
    columns = {
        "shapes of": "{model}", "layers, linear + other": "{layers}", "s per linear layer": "{linear:.1f}",
        "s per other layer": "{other:.1f}", "GPU, GiB": "{gpu:.1f}", "host, GiB": "{host:.1f}",
        "minutes for all layers": "{minutes:.0f}",
    }  # fmt: skip
    about = f"{measured['device']}, {measured['samples']} x {measured['length']} tokens"
    return f"{about} ([record](records/production.json)):\n\n{table(columns, rows)}"


def _times() -> list[dict[str, Any]]:
    alone, large = MEASURED["seconds_alone"], MEASURED["delta_net-1.3b"]
    rows = [{"model": f"{title}, key dim 64", "seconds": alone[name]["command"]} for title, name in MODELS.items()]
    peak = large["peak_allocated_gib"]
    return [
        *rows,
        {
            "model": "DeltaNet 1.3B, random weights, 512 x 1024 tokens",
            "seconds": large["command_seconds"],
            "peak": peak,
        },
    ]


PLACES = pairs(dict.fromkeys(MODELS, KEY_DIMS))
TABLES = {
    "reconstruction": grid(
        ("nats over uncut",),
        [("cut only",), *((way,) for way in WAYS)],
        PLACES,
        lambda way, place: f"{gained(way, *place):.3f}",
    ),
    "reconstruction-times": table(
        {"": "{model}", "seconds": "{seconds:.0f}", "GPU memory, GiB": "{peak:.1f}"}, _times()
    ),
    "reconstruction-recall": grid(
        ("model", "key dim"), pairs(dict.fromkeys(MODELS, (128, 64, 32))), ("cut", "reconstructed"), _recalled
    ),
    "reconstruction-variants": grid(("error measured",), [(way,) for way in VARIANTS], MODELS, _variant),
    "reconstruction-bundled": table(
        {
            "key dim": "{key_dim}",
            "options": "{options}",
            "nats over uncut": "{lost:.3f}",
            "loss that came back": "{back}",
            "minutes": "{minutes:.1f}",
        },
        _bundled(),
    ),
    "weighted": grid(("tokens count",), [(title,) for title in WEIGHTS], PLACES, _weighted),
    "production": _production(),
    "reconstruction-memory": table({"": "{part}", "GB": "{gb:.2f}"}, _memory()),
}
NUMBERS = {
    "recall-error-gated": recall_errors(
        [
            seeds
            for (model, _, what), seeds in RECALL.items()
            if "gated" in model and what in ("uncut", "cut", "reconstructed")
        ]
    ),
}
