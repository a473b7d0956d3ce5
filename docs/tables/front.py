"""README.md, and the numbers of guides/recover.md: a few results from the other pages."""

from __future__ import annotations

import statistics

from tables.layout import markdown, only, record, timings
from tables.reconstruct import DISTILLED, back, compared
from tables.recovery import RECALL, ROWS, SHARES, nats, recall_errors

TIMED = "DeltaNet 1.3B, random weights, H200"


def _decoding(batch: int) -> str:
    return f"{timings('bench-decode', model='delta_net-1.3b', batch=batch)[64]['speedup']:.2f}x as fast"


def _most_sequences() -> str:
    rows = record("bench-decode")["largest_batch"]
    cut, uncut = (only(rows, model="delta_net-1.3b", key_dim=key_dim)["batch"] for key_dim in (64, 128))
    return f"{cut / uncut:.2f}x as many"


def _layer(model: str) -> str:
    row = timings("bench-mixer", model=model, mode="forward")[64]
    return f"{row['speedup']:.2f}x as fast, {row['memory_ratio']:.2f} of the memory"


def _prompt() -> str:
    return f"{timings('bench-prefill', model='delta_net-1.3b')[64]['speedup']:.2f}x as fast"


def _perplexity() -> str:
    cut = record("bundled-eval-64")
    return f"{cut['baseline']['word_perplexity']:.1f} to {cut['word_perplexity']:.1f}"


def _reconstructed(title: str, model: str) -> list[list[str]]:
    """Return the rows of a model that was cut to half of its keys and reconstructed: perplexity and recall."""
    uncut, cut = (compared(title, key_dim, 128) for key_dim in (128, 64))
    return [
        ["word perplexity, `--reconstruct`", f"{uncut['word']:.1f} to {cut['after_word']:.1f}", model],
        ["names recalled, `--reconstruct`", f"{uncut['recall']:.0f} % to {cut['after_recall']:.0f} %", model],
    ]


def _range(shares: list[float]) -> str:
    return f"{100 * min(shares):.0f}-{100 * max(shares):.0f}"


def _row(model: str, letter: str, method: str = "drrqr") -> dict[str, object]:
    return only(ROWS, model=model, letter=letter, method=method, key_dim=64)


def _recalled(run: str, key_dim: int = 64) -> str:
    return f"{100 * statistics.mean(RECALL['gated_deltanet-31m', key_dim, run]):.0f}"


GAP = nats("long reconstructed-64")["after"] - nats("long control")["after"]
TABLES = {
    "gains": markdown(
        ["half of the key channels removed", "", "measured on"],
        [
            ["decoding step, 1,024 sequences", _decoding(1024), TIMED],
            ["decoding step, 64 sequences", _decoding(64), TIMED],
            ["decoding step, one sequence", _decoding(1), TIMED],
            ["sequences that fit in GPU memory", _most_sequences(), TIMED],
            ["reading a prompt", _prompt(), TIMED],
            ["one DeltaNet layer, forward", _layer("delta_net"), "H200"],
            ["one Gated DeltaNet layer, forward", _layer("gated_deltanet"), "H200"],
            ["word perplexity, no training", _perplexity(), "bundled 4.6M DeltaNet, WikiText-2"],
            *_reconstructed("DeltaNet", "DeltaNet 30M"),
            *_reconstructed("Hybrid", "30M hybrid like Qwen3-Next"),
        ],
    ),
}
NUMBERS = {
    "reconstruct-back": _range(back("reconstructed")),
    "distill-back": _range(back(DISTILLED)),
    "recover-gap": f"{GAP:.3f}",
    "recover-delta": str(_row("DeltaNet", "I")["closed"]).removesuffix(" %"),
    "recover-gated": str(_row("Gated DeltaNet", "I")["closed"]).removesuffix(" %"),
    "recover-uncut-teacher": str(_row("DeltaNet", "A")["closed"]).removesuffix(" %"),
    "recover-like-delta": SHARES["DeltaNet", "I, `drrqr`"]["Wikipedia"].removesuffix(" %"),
    "recover-like-gated": SHARES["Gated DeltaNet", "I, `drrqr`"]["Wikipedia"].removesuffix(" %"),
    "recover-taught-delta": SHARES["DeltaNet", "I, `drrqr`"]["taught"].removesuffix(" %"),
    "recover-taught-gated": SHARES["Gated DeltaNet", "I, `drrqr`"]["taught"].removesuffix(" %"),
    "recover-recall": _recalled("gated taught seed 1 reconstructed-64"),
    "recover-recall-teacher": _recalled("gated tuned control", 128),
    "gated-uncut": f"{nats('gated long reconstructed-64')['uncut']:.2f}",
    "gated-uncut-teacher": f"{nats('gated long reconstructed-64')['after']:.2f}",
    "gated-no-teacher": f"{nats('gated no teacher 1e-3 reconstructed-64')['after']:.2f}",
    "gated-control-teacher": f"{nats('gated taught reconstructed-64')['after']:.2f}",
    "gated-control": f"{nats('gated tuned control')['after']:.2f}",
    "recall-error": recall_errors(list(RECALL.values())),
}
