"""RECONSTRUCT.md: what training the cut layers brings."""

from __future__ import annotations

import statistics
from typing import Any

from tables.layout import GIB, grid, only, pairs, percent, recall_errors, recall_scores, record, sweep, table
from tables.recovery import MODELS

MEASURED = record("reconstruction-30m")
TRIED = record("reconstruction-ways")
KEY_DIMS = (64, 32, 16)
DISTILLED = "`--reconstruct --distill 600`"
KEPT = "reconstructed, heads kept"
# what the rows of `DIMS` are, or rows of the record, by the options of the command
WAYS: dict[str, str | dict[str, Any]] = {
    "`--reconstruct --keep-heads`": KEPT,
    "the same, 600 steps": {"way": "--reconstruct", "steps": 600},
    "600 steps, then 300 of distillation without repetitions": {"way": "--distill 300"},
    "`--reconstruct`": "reconstructed",
    DISTILLED: {"way": "heads from others, distilled"},
}  # fmt: skip
# by model: key and value dims, the uncut ones first
ALL_MODELS = {**MODELS, "Hybrid": "qwen3_next-30m", "Mamba-2": "mamba2-30m"}
VALUES = {"DeltaNet": 128, "Gated DeltaNet": 256, "Hybrid": 128, "Mamba-2": 64}
KEYS = {title: [(key_dim, VALUES[title]) for key_dim in (128, *KEY_DIMS)] for title in ALL_MODELS}
BOTH = {
    "DeltaNet": [(128, 128), (96, 96), (64, 128), (128, 64), (32, 128), (64, 64)],
    "Gated DeltaNet": [(128, 256), (96, 192), (64, 256), (128, 128), (32, 256), (64, 128)],
}
DIMS = {(row["model"], row["key_dim"], row["value_dim"], row["what"]): row for row in record("dims-30m")["rows"]}
WEIGHTED = {  # of both methods on a CPU in float32, except for drrqr of the Gated DeltaNet
    title: sweep(f"sweep-{name}-main", f"sweep-{name}-weighted") for title, name in MODELS.items()
}
WEIGHTS = {"all tokens alike (`drrqr`)": "drrqr", "by the squared gradient (`drrqr-weighted`)": "drrqr-weighted"}
VARIANTS = (
    "behind the layer",
    "behind the mixer",
    "behind the mixer, channels chosen in the uncut model",
    "behind the mixer, errors relative to the residual stream",
    "behind the mixer, every token counts alike",
)


def compared(title: str, key_dim: int, value_dim: int, after: str = "reconstructed") -> dict[str, Any]:
    """Return a row of a cut and its reconstruction, or of the uncut model: perplexity per word, nats, recall."""
    name = ALL_MODELS[title]
    widths = KEYS[title][0]
    row: dict[str, Any] = {"model": title, "dims": f"{key_dim} x {value_dim}"}
    if (key_dim, value_dim) == widths:
        uncut = DIMS[(name, *widths, "uncut")]
        return {**row, "word": uncut["word_perplexity"], "recall": 100 * _recalled(uncut), "state": "100 %"}
    row["state"] = percent(key_dim * value_dim / (widths[0] * widths[1]))
    for what, prefix in (("cut", ""), (after, "after_")):
        measured = DIMS[name, key_dim, value_dim, what]
        row |= {
            f"{prefix}word": measured["word_perplexity"],
            f"{prefix}nats": lost(title, key_dim, value_dim, what),
            f"{prefix}recall": 100 * _recalled(measured),
        }
    return row


def _scores(row: dict[str, Any]) -> list[float]:
    return recall_scores(row["right"], record("dims-30m")["questions"])


def _recalled(row: dict[str, Any]) -> float:
    return statistics.mean(_scores(row))


def lost(title: str, key_dim: int, value_dim: int, what: str) -> float:
    """Return the nats per token over the uncut model on WikiText-2."""
    uncut = DIMS[(ALL_MODELS[title], *KEYS[title][0], "uncut")]
    return DIMS[ALL_MODELS[title], key_dim, value_dim, what]["nats_per_token"] - uncut["nats_per_token"]


def gained(way: str, title: str, key_dim: int) -> float:
    """Return the nats per token over the uncut model on WikiText-2, after what an option did."""
    where = WAYS.get(way, way)
    if isinstance(where, str):
        return lost(title, key_dim, KEYS[title][0][1], where)
    row = only(MEASURED["rows"], model=MODELS[title], key_dim=key_dim, **where)
    return row["nats_over_uncut"]["wikitext2"]


def back(way: str) -> list[float]:
    """Return the share of the loss that came back, for both models and all key dims."""
    return [1 - gained(way, *place) / gained("cut", *place) for place in PLACES]


def _weighted(title: str, place: tuple[str, int]) -> str:
    model, key_dim = place
    return f"{WEIGHTED[model][WEIGHTS[title], 'kq', key_dim]['word_ratio']:.3f}"


def _variant(way: str, model: str) -> str:
    row = only(MEASURED["rows"], model=MODELS[model], key_dim=32, way=way, steps=400, learning_rate=1e-3)
    return f"{row['nats_over_uncut']['wikitext2']:.3f}"


def _ways(*models: str) -> str:
    """Return a line for each way that was tried on these models, and its nats over the uncut model on each text."""
    rows = [row for row in TRIED["rows"] if row["model"] in models]
    names = {"wikitext2": "WikiText-2", "fineweb_edu": "FineWeb-Edu", "latex": "LaTeX", "held_out": "held out"}
    texts = [text for text in names if all(text in row["nats_over_uncut"] for row in rows)]
    by_way: dict[str, dict[str, str]] = {}
    for row in rows:
        titles = [f"{title}, " for title, name in MODELS.items() if row["model"].startswith(name)]
        title = titles[0] if len(models) > 1 else ""
        cells = by_way.setdefault(row["way"], {"way": row["way"]})
        cells |= {f"{title}{names[text]}": f"{row['nats_over_uncut'][text]:.3f}" for text in texts}
    columns = dict.fromkeys(column for cells in by_way.values() for column in cells)
    return table({column: "{" + column + "}" for column in columns}, by_way.values())


def _kinds() -> list[dict[str, Any]]:
    """Return how the loss divides over kinds of tokens."""
    return [
        {"model": title, "text": text, "kind": kind, **cell}
        for title, name in MODELS.items()
        for text, place in (("WikiText-2", "wikitext2"), ("held out", "held_out"))
        for kind, cell in TRIED["divided"][name][place]["by_kind"].items()
    ]


def _bundled() -> list[dict[str, Any]]:
    """Return a row for each key dim and command on the bundled model, with the share of the loss that came back."""
    measured = record("bundled-reconstruction")
    rows = []
    for row in measured["rows"]:
        start = f"slimstate prune demo/model --key-dim {row['key_dim']} --data demo/calibration.txt"
        options = row["command"].removeprefix(start).removesuffix(" --out SLIM").strip()
        lost = row["nats_per_token"] - measured["uncut"]
        cut = only(measured["rows"], command=f"{start} --out SLIM")["nats_per_token"] - measured["uncut"]
        more = {"back": percent(1 - lost / cut)} if options else {}
        more |= {"minutes": row["seconds"] / 60} if row["seconds"] else {}
        rows.append(
            {"key_dim": row["key_dim"], "options": f"`{options}`" if options else "cut only", "lost": lost, **more}
        )
    return sorted(rows, key=lambda row: -row["key_dim"])


def _heads() -> list[dict[str, Any]]:
    """Return a row for each head of the layers that lose most: the cost of its cut, and of its removal."""
    layers = record("heads-30m")["heads"].items()
    return [
        {"layer": layer, "head": head, "cut": cut, "removed": removed, "copies": measured["origins"].count(head)}
        for layer, measured in layers
        for head, (cut, removed) in enumerate(zip(measured["cut"], measured["removed"], strict=True))
    ]


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
    """Return what reconstructions at full width took."""
    measured = record("production")
    rows = []
    for name, model in measured["models"].items():
        part, whole = model["reconstruct"], model["estimate"]
        row = {"model": name, "layers": f"{model['all']['linear']} + {model['all']['other']}"}
        seconds = {kind: [each["seconds"] for each in part["layers"] if each["kind"] == kind] for kind in model["few"]}
        row |= {"linear": statistics.median(seconds["linear"][1:]), "other": statistics.median(seconds["other"])}
        row |= {"first": seconds["linear"][0], "minutes": whole["total"] / 60}
        peak = max(layer.get("gpu_peak_bytes") or 0 for layer in part["layers"])
        row |= {"gpu": peak / GIB, "host": part["host_peak_bytes"] / GIB, "processor": part["processor_seconds"]}
        rows.append({**row, "prune": model["prune"]["seconds"], "all": part["seconds"]})
    columns = {
        "shapes of": "{model}", "`prune`, s": "{prune:.0f}", "`--reconstruct`, s": "{all:.0f}",
        "first linear layer, s": "{first:.1f}", "each next, s": "{linear:.1f}", "other layers, s": "{other:.1f}",
        "processor, s": "{processor:.0f}", "GPU, GiB": "{gpu:.1f}", "host, GiB": "{host:.1f}",
        "layers of the whole": "{layers}", "minutes for all": "{minutes:.0f}",
    }  # fmt: skip
    about = f"{measured['device']}, {measured['samples']} x {measured['length']} tokens"
    return f"{about} ([record](records/production.json)):\n\n{table(columns, rows)}"


def _mean_linear_layer() -> float:
    """Return the mean seconds of the linear layers at full width."""
    layers = record("production")["models"]["qwen3-next-80b"]["reconstruct"]["layers"]
    return statistics.mean(layer["seconds"] for layer in layers if layer["kind"] == "linear")


def _times() -> list[dict[str, Any]]:
    alone, large = MEASURED["seconds_alone"]["distilled"], MEASURED["delta_net-1.3b"]
    layers = alone["choice_of_heads"] + alone["cut_and_reconstruction"]
    return [
        {
            "model": "Gated DeltaNet, key dim 64, `--reconstruct --distill 600`",
            "seconds": alone["command_seconds"],
            "layers": layers,
            "distillation": alone["distillation"],
            "peak": alone["peak_allocated_gib"],
        },
        {
            "model": "DeltaNet 1.3B, random weights, 512 x 1024 tokens, heads kept",
            "seconds": large["command_seconds"],
            "layers": large["reconstruction_seconds"],
            "peak": large["peak_allocated_gib"],
        },
    ]


def _searches() -> list[dict[str, Any]]:
    """Return a row for each choice of heads that was tried on all six cuts, with the sum of what they lose."""
    return [
        {"way": row["way"], **row["nats_over_uncut"], "sum": sum(row["nats_over_uncut"].values())}
        for row in TRIED["search"]["rows"]
    ]


PLACES = pairs(dict.fromkeys(MODELS, KEY_DIMS))
PLACE = {"model": "{model}", "key x value dim": "{dims}"}
MEASURES = {
    "word perplexity": "{word:.1f}", "word perplexity, reconstructed": "{after_word:.1f}",
    "nats over uncut": "{nats:.3f}", "nats, reconstructed": "{after_nats:.3f}",
    "recall, %": "{recall:.1f}", "recall, reconstructed": "{after_recall:.1f}",
}  # fmt: skip
TABLES = {
    "reconstruction": table({**PLACE, **MEASURES}, (compared(title, *dims) for title in KEYS for dims in KEYS[title])),
    "dims": table(
        {**PLACE, "state": "{state}", **MEASURES},
        (compared(title, *dims, after=KEPT) for title in BOTH for dims in BOTH[title]),
    ),
    "reconstruction-distilled": grid(
        ("nats over uncut",),
        [(way,) for way in WAYS],
        PLACES,
        lambda way, place: f"{gained(way, *place):.3f}",
    ),
    "reconstruction-times": table(
        {
            "": "{model}",
            "seconds": "{seconds:.0f}",
            "of them heads and layers": "{layers:.0f}",
            "distillation": "{distillation:.0f}",
            "GPU memory, GiB": "{peak:.1f}",
        },
        _times(),
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
    "ways": _ways(*MODELS.values()),
    "ways-bundled": _ways("bundled"),
    "ways-little": _ways(*(f"{model}, little text" for model in MODELS.values())),
    "ways-heads": _ways(*(f"{model}, heads" for model in MODELS.values())),
    "ways-search": table(
        {
            "way": "{way}",
            **{f"{title}, {key_dim}": f"{{{MODELS[title]} {key_dim}:.3f}}" for title, key_dim in PLACES},
            "sum": "{sum:.3f}",
        },
        _searches(),
    ),
    "loss-by-token": table(
        {
            "model": "{model}",
            "text": "{text}",
            "token": "{kind}",
            "share of the tokens": "{tokens:.0%}",
            "nats lost by one": "{nats:.3f}",
            "share of the loss": "{share:.0%}",
        },
        _kinds(),
    ),
    "loss-by-layer": grid(
        ("one layer of the cut",),
        [(title,) for title in MODELS],
        range(8),
        lambda title, layer: f"{TRIED['divided'][MODELS[title]]['layers_alone'][layer]:.3f}",
    ),
    "loss-by-head": table(
        {
            "layer": "{layer}",
            "head": "{head}",
            "nats, if it alone is cut": "{cut:.3f}",
            "nats, if it is removed": "{removed:.3f}",
            "heads made from it": "{copies}",
        },
        _heads(),
    ),
    "weighted": grid(("tokens count",), [(title,) for title in WEIGHTS], PLACES, _weighted),
    "production": _production(),
    "production-rates": table(
        {"layer": "{layer}", "cut": "{before:.3f}"}
        | {rate: f"{{{rate}:.4f}}" for rate in ("2e-3", "5e-4", "1e-4")}
        | {"by default": "{default:.4f}", "which chose": "{chosen}"},
        record("production")["rates"]["rows"],
    ),
    "reconstruction-memory": table({"": "{part}", "GB": "{gb:.2f}"}, _memory()),
}
NUMBERS = {
    "production-mean": f"{_mean_linear_layer():.0f}",
    "dims-recall-error": recall_errors(map(_scores, DIMS.values())),
    "reconstruction-sum": f"{sum(gained('reconstructed', *place) for place in PLACES):.3f}",
    "reconstruction-cut-sum": f"{sum(gained('cut', *place) for place in PLACES):.2f}",
    "reconstruction-kept-sum": f"{sum(gained(KEPT, *place) for place in PLACES):.3f}",
    "reconstruction-distilled-sum": f"{sum(gained(DISTILLED, *place) for place in PLACES):.3f}",
}
