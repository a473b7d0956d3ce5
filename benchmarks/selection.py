"""Time selection: all heads of a model in one batch against the paper's procedure, head by head.

    python benchmarks/selection.py [--heads 384 --width 128 --keep 64 --rows 5000]

The paper's procedure for one head: QR with column pivoting of its sampled activations in float32, then swaps, each
followed by a full QR, until no rho exceeds f. Ours: strong RRQR of the Gram matrices of all heads.
"""

from __future__ import annotations

import json
import time

import numpy as np
import scipy.linalg
import torch
from harness import arguments

from slimstate.selectors.rrqr import strong_rrqr


def activations(heads: int, rows: int, width: int, seed: int) -> np.ndarray:
    """Return keys or queries like those of a trained model: decaying spectrum, correlated channels, positive bias."""
    generator = np.random.default_rng(seed)
    spectrum = np.logspace(0, -2, width)
    mixing = np.stack([np.linalg.qr(generator.standard_normal((width, width)))[0] for _ in range(heads)])
    x = generator.standard_normal((heads, rows, width)) * spectrum
    x = x @ mixing.transpose(0, 2, 1)
    return np.asarray(x / (1 + np.exp(-4 * x)), dtype=np.float32)


def select_head_by_full_qr(matrix: np.ndarray, keep: int, f: float) -> tuple[list[int], int]:
    """Return the channels that QRCP and swaps, each with a new QR, keep in one head, and the number of swaps."""
    _, order = scipy.linalg.qr(matrix, mode="r", pivoting=True)
    order = order.copy()
    swaps = 0
    while True:
        r = scipy.linalg.qr(matrix[:, order], mode="r")[0][: matrix.shape[1]]
        a, b, c = r[:keep, :keep], r[:keep, keep:], r[keep:, keep:]
        inverse = scipy.linalg.solve_triangular(a, np.eye(keep, dtype=a.dtype))
        rho = np.sqrt((inverse @ b) ** 2 + np.outer(np.linalg.norm(inverse, axis=1), np.linalg.norm(c, axis=0)) ** 2)
        i, j = np.unravel_index(rho.argmax(), rho.shape)
        if rho[i, j] <= f:
            return sorted(order[:keep].tolist()), swaps
        order[i], order[keep + j] = order[keep + j], order[i]
        swaps += 1


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--heads", type=int, default=384)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--keep", type=int, default=64)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--f", type=float, default=1.5)
    parser.add_argument("--timed-heads", type=int, default=16, help="heads on which the slow procedure is run")
    options = parser.parse_args()
    if options.toy:
        options.heads, options.width, options.keep, options.rows, options.timed_heads = 6, 16, 8, 200, 6
    timed = min(options.timed_heads, options.heads)
    sample = activations(timed, options.rows, options.width, seed=0)
    grams = torch.from_numpy(np.einsum("hnc,hnd->hcd", sample.astype(np.float64), sample.astype(np.float64)))
    grams = grams.repeat(-(-options.heads // timed), 1, 1)[: options.heads]

    start = time.perf_counter()
    slow = [select_head_by_full_qr(matrix, options.keep, options.f) for matrix in sample]
    slow_seconds = (time.perf_counter() - start) / timed * options.heads

    strong_rrqr(grams[:2], options.keep, options.f)
    start = time.perf_counter()
    fast = strong_rrqr(grams, options.keep, options.f)
    fast_seconds = time.perf_counter() - start

    agree = sum(fast.keep[n].tolist() == keep for n, (keep, _) in enumerate(slow))
    assert float(fast.rho.max()) <= options.f
    record = {
        "heads": options.heads,
        "width": options.width,
        "keep": options.keep,
        "rows": options.rows,
        "f": options.f,
        "paper_seconds": slow_seconds,
        "paper_heads_timed": timed,
        "paper_swaps": sum(swaps for _, swaps in slow),
        "slimstate_seconds": fast_seconds,
        "slimstate_swaps": int(fast.swaps[:timed].sum()),
        "speed_up": slow_seconds / fast_seconds,
        "same_choice": f"{agree} of {timed}",
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
