"""README.md, the first sections of EXPERIMENTS.md and PERFORMANCE.md, and guides: results from the other pages."""

from __future__ import annotations

from typing import Any

from tables.experiments import HYBRID, MAIN, MAMBA2
from tables.layout import METHODS, grid, markdown, only, record, select, sweep, table, timings
from tables.reconstruct import DISTILLED, KEYS, back, compared

TRAINED = {
    "DeltaNet": "DeltaNet 30M", "Gated DeltaNet": "Gated DeltaNet 31M", "Hybrid": "hybrid 30M, like Qwen3-Next",
    "Mamba-2": "Mamba-2 30M",
}  # fmt: skip
HALVES = {**MAIN, "hybrid 30M": sweep(HYBRID), "Mamba-2 30M": sweep(MAMBA2)}
STEP = "DeltaNet 1.3B, whole step"
SHAPES = {"Qwen3-Next, vLLM kernel": "qwen3_next", "Mamba-2, vLLM kernel": "mamba2"}


def _decoding(batch: int) -> str:
    return f"{timings('bench-decode', model='delta_net-1.3b', batch=batch)[64]['speedup']:.2f}x as fast"


def _most_sequences() -> str:
    """Return the range of two runs."""
    ratios = []
    for name in ("bench-decode", "bench-decode-sizes"):
        rows = record(name)["largest_batch"]
        cut, uncut = (only(rows, model="delta_net-1.3b", key_dim=key_dim)["batch"] for key_dim in (64, 128))
        ratios.append(f"{cut / uncut:.2f}x")
    return f"{' and '.join(ratios)} as many, in two runs"


def _layer(model: str) -> str:
    row = timings("bench-mixer", model=model, mode="forward")[64]
    return f"{row['speedup']:.2f}x as fast, {row['memory_ratio']:.2f} of the memory"


def _prompt() -> str:
    return f"{timings('bench-prefill', model='delta_net-1.3b')[64]['speedup']:.2f}x as fast"


def _ratio(pair: list[float]) -> str:
    return f"{pair[1] / pair[0]:.2f}x"


def _gains() -> list[list[str]]:
    """Return what half of the key dim gains, by model: sequences that fit and decoding speed at two contexts."""
    lines = []
    for model, gains in record("gains")["gains"].items():
        rows = (gains[0], gains[-1])  # the same row without KV caches
        lines.append([model, *(_ratio(row[name]) for name in ("sequences", "tokens_per_second") for row in rows)])
    return lines


def _costs() -> list[dict[str, Any]]:
    """Return what half of the key dim costs, by model: perplexity and recall before and after a reconstruction."""
    rows = []
    for title, name in TRAINED.items():
        uncut, cut = (compared(title, key_dim, KEYS[title][0][1]) for key_dim in (128, 64))
        rows.append({**cut, "name": name, "uncut_word": uncut["word"], "uncut_recall": uncut["recall"]})
    return rows


def _half(model: str, method: str) -> str:
    return f"{HALVES[model][method, 'kq', 64]['word_ratio']:.2f}"


def _cost(key_dim: int, column: tuple[str, str]) -> str:
    """Return the perplexity or recall of a model that was cut to a key dim and reconstructed."""
    title, measure = column
    row, name = compared(title, key_dim, KEYS[title][0][1]), "word" if "perplexity" in measure else "recall"
    value = row[name if key_dim == 128 else f"after_{name}"]
    return f"{value:.1f}" if name == "word" else f"{value:.0f} %"


def _gain(key_dim: int, column: str) -> str:
    """Return the speed of decoding at a key dim over that at 128; nothing where it was not timed."""
    if column == STEP:
        rows = timings("bench-decode", model="delta_net-1.3b", batch=1024)
    else:
        name = SHAPES[column]
        kernels = record("vllm-kernels-mamba2" if name == "mamba2" else "vllm-kernels")["rows"]
        rows = {row["key_dim"]: row for row in select(kernels, model=name, mode="decode")}
    times = {width: row.get("seconds") or row["ms"] for width, row in rows.items()}
    return f"{times[128] / times[key_dim]:.2f}x" if key_dim in times else ""


def _kept() -> float:
    """Return the share that the kept half of the channels carries in the head where it carries least."""
    return min(sum(head["shares"][channel] for channel in head["keep"]) for head in record("channels")["heads"])


def _range(shares: list[float]) -> str:
    return f"{100 * min(shares):.0f}-{100 * max(shares):.0f}"


TABLES = {
    "front-gains": markdown(
        ["half of the key dim", "sequences, 4k", "sequences, 32k", "tokens/s, 4k", "tokens/s, 32k"], _gains()
    ),
    "front-costs": table(
        {
            "half of the key dim, `--reconstruct`": "{name}",
            "word perplexity": "{uncut_word:.1f} to {after_word:.1f}",
            "names recalled": "{uncut_recall:.0f} % to {after_recall:.0f} %",
        },
        _costs(),
    ),
    "results-costs": table(
        {
            "half of the key dim": "{name}",
            "perplexity, uncut": "{uncut_word:.1f}", "cut": "{word:.1f}", "reconstructed": "{after_word:.1f}",
            "recall, uncut": "{uncut_recall:.0f} %", "recall, cut": "{recall:.0f} %",
            "recall, reconstructed": "{after_recall:.0f} %",
        },
        _costs(),
    ),
    "results-methods": grid(("half of the key dim",), [(model,) for model in HALVES], METHODS, _half),
    "key-dim-costs": grid(
        ("key dim",), [(128,), (64,), (32,), (16,)],
        [(title, measure) for title in KEYS for measure in ("perplexity", "recall")],
        _cost,
    ),
    "key-dim-gains": grid(("key dim",), [(128,), (96,), (64,), (32,), (16,)], (STEP, *SHAPES), _gain),
    "speed-results": markdown(
        ["half of the key channels removed", ""],
        [
            ["decoding step, 1,024 sequences", _decoding(1024)],
            ["decoding step, 64 sequences", _decoding(64)],
            ["decoding step, one sequence", _decoding(1)],
            ["sequences that fit in GPU memory", _most_sequences()],
            ["reading a prompt", _prompt()],
            ["one layer, forward", _layer("delta_net")],
            ["one layer of a Gated DeltaNet, forward", _layer("gated_deltanet")],
        ],
    ),
}  # fmt: skip
NUMBERS = {
    "kept-least": f"{100 * _kept():.0f}",
    "calibration-cost": f"{only(record('bench-calibrate')['rows'], method='drrqr')['times_forward']:.2f}",
    "reconstruct-back": _range(back("reconstructed")),
    "distill-back": _range(back(DISTILLED)),
}
