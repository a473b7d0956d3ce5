"""The pages in docs/serving: engines, kernels, pools and types of the state."""

from __future__ import annotations

from typing import Any

from tables.layout import Row, grid, markdown, only, power, record, select, table

KERNELS = {
    "gated delta rule, decoding": "gated_delta decode",
    "gated delta rule, prefill": "gated_delta prefill",
    "Mamba-2, decoding": "state_space decode",
    "Mamba-2, prefill": "state_space prefill",
    "projections of Qwen3-Next": "Qwen3-Next projections",
    "projections of Qwen3.5, decoding with CUDA": "Qwen3.5 projections, decode with CUDA",
    "projections of Qwen3.5, elsewhere": "Qwen3.5 projections, elsewhere",
    "queries, keys and values, prefill": "queries, keys and values, prefill",
}
SHAPES = {"qwen3_next": "Qwen3-Next", "qwen3_5": "Qwen3.5", "mamba2": "Mamba-2"}


def _verdicts(name: str) -> str:
    """Return what an engine does with each model and key dim, with the larger difference of prefill and decoding."""
    rows = record(name)["rows"]

    def cell(model: str, key_dim: int) -> str:
        row = only(rows, model=model, key_dim=key_dim)
        measured = "" if row["verdict"] == "refuses" else f" {power(max(row['prefill'], row['decoding']))}"
        return row["verdict"] + measured

    models, key_dims = (dict.fromkeys(row[field] for row in rows) for field in ("model", "key_dim"))
    return grid(("model",), [(model,) for model in models], key_dims, cell)


def _sglang_kernel(title: str, key_dim: int) -> str:
    row = only(record("sglang-kernels")["rows"], kernel=KERNELS[title], key_dim=key_dim)
    return "refused" if "error" in row else power(row["difference"])


def _vllm_kernels(name: str) -> str:
    """Return the times of kernels in ms by key dim; of decoding also the speedups."""
    rows = [{**row, "ms": row["ms"] if "ms" in row else 1000 * row["seconds"]} for row in record(name)["rows"]]
    key_dims = list(dict.fromkeys(row["key_dim"] for row in rows))
    lines = []
    for model, mode in dict.fromkeys((row["model"], row["mode"]) for row in rows):
        times = {row["key_dim"]: row["ms"] for row in select(rows, model=model, mode=mode)}
        known = [times.get(key_dim) for key_dim in key_dims]  # the last run was stopped before its last widths
        lines.append([f"{SHAPES[model]}, {mode}, ms", *("" if ms is None else f"{ms:.2f}" for ms in known)])
        if mode == "decode":
            lines.append(
                [f"{SHAPES[model]}, speedup", *(f"{times[128] / times[key_dim]:.2f}x" for key_dim in key_dims)]
            )
    return markdown(["key dim", *map(str, key_dims)], lines)


def _pool(model: str) -> str:
    """Return how many sequences fit, by key dim: of a long context, with shared prefixes, and of a short one."""
    pools = [pool for pool in record("pool")["pools"] if pool["model_type"] == model]
    plain, prefixes, short = (pool["rows"] for pool in pools)

    def sequences(rows: list[Row]) -> list[str]:
        return [f"{row['sequences']:.2f} ({row['gain']:.2f}x)" for row in rows]

    lines = [
        ["state of a layer, KiB", *(f"{row['pages']['state'] / 1024:,.0f}" for row in plain)],
        ["convolution of a layer, KiB", *(f"{row['pages']['convolution'] / 1024:,.0f}" for row in plain)],
        ["block, tokens", *(f"{row['pages']['block']:,}" for row in plain)],
        ["page of a layer, KiB", *(f"{row['pages']['page'] / 1024:,.0f}" for row in plain)],
        ["states of a sequence, MiB", *(f"{row['share']['states'] / 2**20:,.1f}" for row in plain)],
        ["keys and values of 32,768 tokens, MiB", *(f"{row['share']['attention'] / 2**20:,.1f}" for row in plain)],
        ["sequences of 32,768 tokens", *sequences(plain)],
        ["with prefix caching", *sequences(prefixes)],
        ["with a state kept at every block", *(f"{row['cached']:.2f}" for row in prefixes)],
        ["sequences of 4,096 tokens, prefix caching", *sequences(short)],
    ]
    return markdown(["key dim", *(str(row["key_dim"]) for row in plain)], lines)


def _boots() -> list[dict[str, Any]]:
    """Return what vLLM said when it started, without prefix caching and with it."""
    rows = record("vllm-boot")["rows"]
    cached = {(row["model"], row["key_dim"]): row["sequences"] for row in select(rows, prefix_caching=True)}
    return [{**row, "cached": cached.get((row["model"], row["key_dim"]))} for row in select(rows, prefix_caching=False)]


def _state_dtypes() -> str:
    measured = record("sweep-gated_deltanet-31m-state-dtypes")
    uncut = {**measured["uncut"], "method": "uncut", "state_dtype": "float32", "nats_over_uncut": 0.0}
    rows = [uncut, *measured["rows"]]

    def cell(method: str, key_dim: int, dtype: str) -> str:
        row = only(rows, method=method, key_dim=key_dim, state_dtype=dtype)
        return f"{row['state_bytes'] / 2**20:.3f} MiB: {row['nats_over_uncut']:+.4f}"

    cuts = dict.fromkeys((row["method"], row["key_dim"]) for row in rows)
    return grid(("method", "key dim"), cuts, ("float32", "bfloat16", "float8_e4m3"), cell)


def _gains() -> str:
    """Return what half of the key dim gains, by model: sequences that fit and decoding speed at two contexts."""

    def cell(pair: list[float]) -> str:
        return f"{pair[1] / pair[0]:.2f}x ({pair[0]:,.0f} to {pair[1]:,.0f})"

    lines = []
    for model, gains in record("gains")["gains"].items():
        short, long = gains[0], gains[-1]  # the same row without KV caches
        fields = [cell(row[name]) for name in ("sequences", "tokens_per_second") for row in (short, long)]
        lines.append([model, short["card"], *fields])
    titles = [f"{name}, {size}" for name in ("sequences that fit", "tokens/s of all") for size in ("4k", "32k")]
    return markdown(["half of the key dim", "GPUs", *titles], lines)


TABLES = {
    "gains-by-model": _gains(),
    "verify-mlx": _verdicts("verify-mlx"),
    "verify-llama": _verdicts("verify-llama"),
    "verify-llama-values": _verdicts("verify-llama-values"),
    "verify-vllm": _verdicts("verify-vllm"),
    "sglang-kernels": grid(("kernel",), [(title,) for title in KERNELS], (128, 96, 77, 64, 48, 32, 16), _sglang_kernel),
    "vllm-kernels": _vllm_kernels("vllm-kernels"),
    "vllm-kernels-mamba2": _vllm_kernels("vllm-kernels-mamba2"),
    "pool-qwen3-next": _pool("qwen3_next"),
    "pool-qwen3-5": _pool("qwen3_5"),
    "pool-boots": table(
        {
            "model": "{model}",
            "key dim": "{key_dim}",
            "block, tokens": "{block_tokens}",
            "padding": "{padding_percent:.2f} %",
            "blocks": "{blocks:,}",
            "sequences of 4,096 tokens": "{sequences:.2f}",
            "with prefix caching": "{cached:.2f}",
        },
        _boots(),
    ),
    "state-dtypes": _state_dtypes(),
}
