"""PERFORMANCE.md: speed and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tables.layout import DOCS, GIB, grid, only, percent, record, table, timings

LAYERS = {"DeltaNet": "delta_net", "Gated DeltaNet": "gated_deltanet"}
BIG = {"DeltaNet 370M": "delta_net-370m", "DeltaNet 1.3B": "delta_net-1.3b"}
BIGGER = {"DeltaNet 2.7B": "delta_net-2.7b"}
BIG_GATED = {"Gated DeltaNet 370M": "gated_deltanet-370m", "Gated DeltaNet 1.3B": "gated_deltanet-1.3b"}
# records from before the shapes with values twice as wide as keys were called so
WIDE = {f"{title}, wide": model for title, model in BIG_GATED.items()}
WIDE_DECODED = {"Gated DeltaNet 1.3B, wide": "gated_deltanet-1.3b"}
DECODED = {"DeltaNet 1.3B": "delta_net-1.3b", **WIDE_DECODED}
CURVE, PAIRS = (
    json.loads((DOCS.parent / f"src/slimstate/serving/curves/{name}.json").read_text(encoding="utf-8"))
    for name in ("h200", "h200-pairs")
)


def _layers(name: str) -> list[dict[str, Any]]:
    """Return the rows of a benchmark of layers: forward passes, with their training steps and the paper's forward."""
    rows = []
    for title, model in LAYERS.items():
        train, paper = timings(name, model=model, mode="train"), record("paper")["mixers"]["rows"][model]
        for key_dim, forward in timings(name, model=model, mode="forward").items():
            theirs = paper.get(str(key_dim), {})
            ratio = {"ratio": theirs["gib"] / paper["128"]["gib"]} if theirs else {}
            rows.append({"layer": title, **forward, "train": train.get(key_dim, {}), "paper": {**theirs, **ratio}})
    return rows


def _without_gate() -> list[dict[str, Any]]:
    """Return the rows of layers without a gate: what the gated ones need beyond the paper, and the size of q, k, v."""
    rows, settings = _layers("bench-mixer-no-gate"), record("bench-mixer-no-gate")["settings"]
    for row in rows:
        if row["model"] == LAYERS["Gated DeltaNet"] and "gib" in row["paper"]:
            channels = settings["heads"] * (2 * row["key_dim"] + settings["value_dim"])
            packed = 2 * settings["batch"] * settings["length"] * channels / GIB  # bfloat16
            row |= {"more": row["gib"] - row["paper"]["gib"], "packed": packed}
    return rows


def _models(name: str, models: Mapping[str, str], **fields: object) -> list[dict[str, Any]]:
    """Return the rows of a benchmark of whole models, with the share of channels removed and the paper's speedup."""
    paper = record("paper")["speedup"]["compression"]
    rows = []
    for title, model in models.items():
        for key_dim, row in timings(name, model=model, **fields).items():
            removed = f"{100 * (1 - key_dim / row['width']):g}"
            theirs = {"paper": paper[removed][model]} if removed in paper and model in paper[removed] else {}
            rows.append({"title": title, "removed": f"{removed} %", **row, **theirs})
    return rows


def _decoding() -> list[dict[str, Any]]:
    """Return a row for each model, number of sequences and key dim; where the widest does not fit, none."""
    rows = []
    for title, model in DECODED.items():
        for batch in record("bench-decode")["settings"]["batches"]:
            measured = timings("bench-decode", model=model, batch=batch)
            rows += [
                {"title": title, **row, "copying": percent(row["share_of_copy_bandwidth"])}
                for row in measured.values()
                if 128 in measured
            ]
    return rows


def _capacity() -> list[dict[str, Any]]:
    """Return a step of 1024 sequences and the most sequences that fit, of every model that was decoded."""
    sizes = {f"DeltaNet {size}": f"delta_net-{size.lower()}" for size in ("370M", "1.3B", "2.7B")}
    gated = {"Gated DeltaNet 1.3B": "gated_deltanet-1.3b"}
    rows = []
    for name, models in (("bench-decode-sizes", sizes), ("bench-decode", WIDE_DECODED), ("bench-decode-gated", gated)):
        for title, model in models.items():
            for key_dim, row in timings(name, model=model, batch=1024).items():
                most = only(record(name)["largest_batch"], model=model, key_dim=key_dim)["batch"]
                rows.append({"title": title, **row, "state_mib": row["state_bytes"] / 2**20, "most": most})
    return rows


def _pairs() -> list[dict[str, Any]]:
    """Return what key and value dims do to decoding, prompts and memory, over the uncut model."""
    rows = []
    for prompt in record("bench-pairs-prefill")["rows"]:
        dims = {name: prompt[name] for name in ("key_dim", "value_dim")}
        steps = {f"of_{row['batch']}": row["speedup"] for row in PAIRS["rows"] if dims.items() <= row.items()}
        state = only(PAIRS["rows"], **dims, batch=1)["state_bytes"] / 2**20
        most = only(PAIRS["largest_batch"], **dims)["batch"]
        layer = only(record("pairs-mixer")["rows"], **dims, mode="forward")["seconds"]
        first = rows[0]["layer"] if rows else layer
        row = {**prompt, **steps, "state": state, "most": most, "billions": prompt["parameters"] / 1e9}
        rows.append({**row, "layer": layer, "layer_speedup": first / layer})
    return rows


def _scans() -> list[dict[str, Any]]:
    """Return the speeds of Mamba-2 models with slimstate's functions, and beside those of transformers."""
    by_model: dict[str, dict[str, dict[str, Any]]] = {}
    for row in record("families")["rows"]:
        by_model.setdefault(row["model_type"], {})[row["functions"]] = row
    result = []
    for name, rows in by_model.items():
        ours, theirs = rows["slimstate"], rows.get("transformers")
        row: dict[str, Any] = {"model": name, **ours}
        for way in ("forward", "training") if theirs else ():
            speed = f"{way}_tokens_per_second"
            row |= {f"{way}_before": theirs[speed], f"{way}_times": ours[speed] / theirs[speed]}
        result.append(row)
    return result


def _speedup(key_dim: int, title: str) -> str:
    row = only(CURVE["rows"], model=LAYERS[title], key_dim=key_dim)
    return f"{row['speedup']:.2f}"


def _profile() -> str:
    """Return the kernels of a decoding step in groups, in ms, at both key dims."""
    groups = {"state update": "recurrent", "matrix products": "nvjet", "convolutions": "conv", "all else": ""}
    totals = {row["key_dim"]: dict.fromkeys(groups, 0.0) for row in record("profile-decode")["rows"]}
    for row in record("profile-decode")["rows"]:
        for kernel in row["kernels"]:
            group = next(title for title, part in groups.items() if part in kernel["kernel"])
            totals[row["key_dim"]][group] += kernel["ms"]
    return grid(
        ("kernels, ms",), [(title,) for title in groups], totals, lambda title, key_dim: f"{totals[key_dim][title]:.1f}"
    )


def _pruning() -> list[dict[str, Any]]:
    titles = {"forward": "load the model, read the text, forward pass", "drrqr": "`prune --method drrqr`"}
    return [
        {
            "run": title,
            **record("pipeline")[kind],
            "all": ", ".join(f"{seconds:.2f}" for seconds in record("pipeline")[kind]["all_seconds"]),
            "gpu": record("pipeline")[kind]["gpu_peak_bytes"] / GIB,
            "host": record("pipeline")[kind]["host_peak_bytes"] / GIB,
        }
        for kind, title in titles.items()
    ]


def _recurrences() -> list[dict[str, Any]]:
    measured = record("recurrences")
    rows = []
    for row in measured["rows"]:
        cells: dict[str, Any] = {"family": row["family"], "width": row["width"], "inputs": row["inputs"] / 2**20}
        for way in ("forward", "with gradients"):
            naive, chunked, plain = (
                row["seconds"][f"{kind}, {way}"] for kind in ("token by token", "chunked", "plain products")
            )
            cells[way] = {
                "naive": measured["length"] / naive / 1000,
                "chunked": measured["length"] / chunked / 1000,
                "plain": measured["length"] / plain / 1000,
                "gain": naive / chunked,
                "peak": row["peak_bytes"][f"chunked, {way}"] / 2**20,
            }
        rows.append(cells)
    return rows


def _activations(layer: str, length: int, group: str) -> str:
    row = only(record("activations")["rows"], type=layer, length=length)
    if group == "peak / activations":
        return f"{row['peak'] / row['activations']:.2f}"
    return f"{row[group.removesuffix(', MiB')] / 2**20:.1f}"


def _steps() -> list[dict[str, Any]]:
    rows = []
    for row in record("steps")["rows"]:
        for kind in ("forward", "training step"):
            now, before = (row["seconds"][version][kind][0] for version in ("now", "before"))
            shares = {name: percent(share) for name, share in row["shares"]["now"][kind].items()}
            model = "bundled" if row["model"] == "model" else row["model"]
            rows.append({"model": model, "kind": kind, "now": now, "before": before, "gain": before / now, **shares})
    return rows


WIDTHS = sorted({row["key_dim"] for row in CURVE["rows"]}, reverse=True)
MODEL = {
    "model": "{title}",
    "removed": "{removed}",
    "key dim": "{key_dim}",
    "ms": "{ms:.1f}",
    "speedup": "{speedup:.2f}x",
}
STEP_PARTS = (
    "products of layers", "by element", "products of chunks", "triangular solves", "convolutions", "copies", "loss",
    "AdamW", "Python and autograd",
)  # fmt: skip
TABLES = {
    "layers": table(
        {
            "layer": "{layer}",
            "key dim": "{key_dim}",
            "forward, ms": "{ms:.2f}",
            "forward speedup": "{speedup:.2f}x",
            "forward, GiB": "{gib:.2f}",
            "training step, ms": "{train[ms]:.2f}",
            "training speedup": "{train[speedup]:.2f}x",
            "training, GiB": "{train[gib]:.2f}",
        },
        _layers("bench-mixer"),
    ),
    "layers-4096": table(
        {
            "layer": "{layer}",
            "key dim": "{key_dim}",
            "forward, ms": "{ms:.2f}",
            "speedup": "{speedup:.2f}x",
            "the paper's": "{paper[speedup]:.2f}x",
            "GiB": "{gib:.2f}",
            "the paper's GiB": "{paper[gib]:.2f}",
            "memory ratio": "{memory_ratio:.3f}",
            "the paper's ratio": "{paper[ratio]:.3f}",
        },
        _layers("bench-mixer-4096"),
    ),
    "layers-no-gate": table(
        {
            "layer": "{layer}",
            "key dim": "{key_dim}",
            "forward, ms": "{ms:.2f}",
            "speedup": "{speedup:.2f}x",
            "GiB": "{gib:.2f}",
            "memory ratio": "{memory_ratio:.3f}",
            "more than in the paper, GiB": "{more:.2f}",
            "queries, keys and values, GiB": "{packed:.2f}",
        },
        _without_gate(),
    ),
    "widths": grid(("key dim",), [(key_dim,) for key_dim in WIDTHS], LAYERS, _speedup),
    "prefill-4096": table(
        {**MODEL, "the paper's": "{paper:.2f}x", "memory ratio": "{memory_ratio:.2f}"},
        [*_models("bench-model-delta", BIG), *_models("bench-model-gated", BIG_GATED)],
    ),
    "training": table(
        {**MODEL, "the paper's": "{paper:.2f}x", "memory ratio": "{memory_ratio:.2f}"},
        [
            *_models("bench-train-370m", {"DeltaNet 370M, batch 32": "delta_net-370m"}),
            *_models("bench-model", {"DeltaNet 1.3B": "delta_net-1.3b", **BIGGER}, mode="train"),
        ],
    ),
    "prefill-2048": table(
        {**MODEL, "memory ratio": "{memory_ratio:.2f}", "without a CUDA graph, ms": "{eager_ms:.1f}"},
        [*_models("bench-prefill", {**BIG, **BIGGER}), *_models("bench-prefill-gated", WIDE)],
    ),
    "decoding": table(
        {
            "model": "{title}",
            "sequences": "{batch:,}",
            "key dim": "{key_dim}",
            "ms": "{ms:.2f}",
            "speedup": "{speedup:.2f}x",
            "tokens/s": "{tokens_per_second:,.0f}",
            "state traffic, share of copying": "{copying}",
            "roofline, ms": "{roofline_ms:.2f}",
        },
        _decoding(),
    ),
    "scans": table(
        {
            "model": "{model}",
            "forward, tokens/s": "{forward_tokens_per_second:,}",
            "by transformers": "{forward_before:,}",
            "times": "{forward_times:.1f}x",
            "training, tokens/s": "{training_tokens_per_second:,}",
            "training by transformers": "{training_before:,}",
            "times as fast": "{training_times:.1f}x",
            "GiB": "{training_gib:.1f}",
        },
        _scans(),
    ),
    "pairs": table(
        {
            "key dim x value dim": "{key_dim} x {value_dim}",
            "state, MiB": "{state:.0f}",
            "parameters": "{billions:.2f}B",
            "step, 1 sequence": "{of_1:.2f}x",
            "64": "{of_64:.2f}x",
            "1,024": "{of_1024:.2f}x",
            "most sequences": "{most:,}",
            "prompts": "{speedup:.2f}x",
            "one layer": "{layer_speedup:.2f}x",
        },
        _pairs(),
    ),
    "capacity": table(
        {
            "model": "{title}",
            "key dim": "{key_dim}",
            "state per sequence, MiB": "{state_mib:g}",
            "step of 1,024 sequences, ms": "{ms:.1f}",
            "speedup": "{speedup:.2f}x",
            "most sequences": "{most:,}",
        },
        _capacity(),
    ),
    "decoding-profile": _profile(),
    "calibration": table(
        {
            "": "{method}",
            "seconds": "{seconds:.3f}",
            "times the forward": "{times_forward:.2f}",
            "choosing, s": "{selection_seconds:.2f}",
            "GPU memory, GiB": "{gib:.2f}",
            "times that of the forward": "{memory_ratio:.2f}",
        },
        [{**row, "gib": row["peak_bytes"] / GIB} for row in record("bench-calibrate")["rows"]],
    ),
    "pruning": table(
        {
            "": "{run}",
            "seconds": "{seconds:.2f}",
            "all three runs": "{all}",
            "GPU, GiB": "{gpu:.2f}",
            "host, GiB": "{host:.2f}",
        },
        _pruning(),
    ),
    "recurrences": table(
        {
            "recurrence": "{family}",
            "width": "{width}",
            "token by token": "{forward[naive]:.1f}",
            "chunked": "{forward[chunked]:.1f}",
            "gain": "{forward[gain]:.0f}x",
            "plain products": "{forward[plain]:.0f}",
            "token by token with gradients": "{with gradients[naive]:.1f}",
            "chunked with gradients": "{with gradients[chunked]:.1f}",
            "gain with gradients": "{with gradients[gain]:.0f}x",
            "plain products with gradients": "{with gradients[plain]:.0f}",
            "peak, MiB": "{forward[peak]:.1f}",
            "peak with gradients": "{with gradients[peak]:.1f}",
            "inputs, MiB": "{inputs:.1f}",
        },
        _recurrences(),
    ),
    "activations": grid(
        ("layer", "length"),
        [(row["type"], row["length"]) for row in record("activations")["rows"] if row["length"] in (512, 4096)],
        ("activations, MiB", "peak, MiB", "peak / activations"),
        _activations,
    ),
    "steps": table(
        {
            "model": "{model}",
            "work": "{kind}",
            "seconds": "{now:.3f}",
            "before": "{before:.3f}",
            "gain": "{gain:.2f}x",
            **{part: f"{{{part}}}" for part in STEP_PARTS},
        },
        _steps(),
    ),
}
