"""What every method's cut costs: perplexity as a ratio to the uncut model, from one calibration, by masking.

    python benchmarks/cuts.py --model MODEL --data CALIBRATION --text TEXT [--key-dims 64 32 16] [--scores kq k q]

Nothing is written. One cut (the last method, the first key dim) is also made for real, reloaded and measured.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path

from slimstate.calibration import calibrate
from slimstate.checkpoint import Checkpoint
from slimstate.data import sample_windows
from slimstate.evaluate import evaluation_windows, mean_nats
from slimstate.evidence import EvidenceFile
from slimstate.planning import make_plan
from slimstate.prune import apply_plan
from slimstate.record import versions
from slimstate.runtime import Runtime, load
from slimstate.selectors import SELECTORS, Request
from slimstate.taps import masked

DEMO = Path(__file__).parent.parent / "demo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO / "model"))
    parser.add_argument("--data", default=str(DEMO / "calibration.txt"))
    parser.add_argument("--text", default=str(DEMO / "evaluation.txt"))
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=200_000)
    parser.add_argument("--key-dims", type=int, nargs="+", default=[64, 32, 16])
    parser.add_argument("--scores", nargs="+", default=["kq"])
    parser.add_argument("--device", default=None)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.toy:
        options.samples, options.length, options.max_tokens, options.key_dims = 2, 64, 128, [64]
    checkpoint, runtime = Checkpoint.open(options.model), load(Path(options.model), device=options.device)
    windows = sample_windows(runtime.tokenizer, options.data, samples=options.samples, length=options.length)
    needs = frozenset({"gram", "input", "gradient"})
    evidence = calibrate(runtime, checkpoint.mixers, windows.tokens, needs)
    gathered = EvidenceFile(model=checkpoint.fingerprint, calibration=windows.describe(), evidence=evidence)
    tokens = evaluation_windows(runtime.tokenizer, options.text, 1024, options.max_tokens)

    def perplexity(of: Runtime) -> float:
        return math.exp(mean_nats(of, tokens))

    uncut = perplexity(runtime)
    ratios: dict[str, float] = {}
    for key_dim in options.key_dims:
        for method in SELECTORS:
            for score in options.scores:
                plan = make_plan(checkpoint, method, Request(keep=key_dim, score=score), gathered)
                with masked(runtime.model, checkpoint.mixers, plan.selections):
                    ratios[f"{method} {score} {key_dim}"] = perplexity(runtime) / uncut
    method, key_dim = list(SELECTORS)[-1], options.key_dims[0]
    plan = make_plan(checkpoint, method, Request(keep=key_dim), gathered)
    with tempfile.TemporaryDirectory() as folder:
        apply_plan(checkpoint, plan, Path(folder) / "cut")
        cut = perplexity(load(Path(folder) / "cut", device=options.device)) / uncut
    record = {
        "model": options.model,
        "calibration": windows.describe(),
        "text": options.text,
        "tokens": tokens.numel(),
        "kernels": runtime.kernels,
        "versions": versions(),
        "uncut_perplexity": uncut,
        "masked_ratio": ratios,
        "cut_ratio": {f"{method} kq {key_dim}": cut},
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
