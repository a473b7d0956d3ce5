"""Time a sweep against its parts, and a trace of states against a plain forward pass.

    python benchmarks/seeing.py --model MODEL --data CALIBRATION --text TEXT [--samples 8 --max-tokens 16384]

A sweep of five methods at three compressions should cost little more than one calibration and fifteen evaluations; the
parts are timed in the same process, before and after it. Traces and forward passes take turns. The peak memory of a
trace is measured in fresh processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from harness import DEMO, arguments, last_line_of, peak_memory_kib, seconds

import slimstate
from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.text import sample_windows
from slimstate.evaluation.perplexity import evaluation_windows, window_nats
from slimstate.evaluation.state_traces import trace_states
from slimstate.models.load import load
from slimstate.pruning.calibration import calibrate
from slimstate.records.base import versions

COMPRESSIONS = (0.5, 0.75, 0.875)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default=str(DEMO / "model"))
    parser.add_argument("--data", default=str(DEMO / "calibration.txt"))
    parser.add_argument("--text", default=str(DEMO / "evaluation.txt"))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--device", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--memory", type=int, nargs="*", default=[1024, 8192], help="lengths at which to measure peak memory"
    )
    parser.add_argument("--trace-only", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.toy:
        options.samples, options.length, options.max_tokens, options.rounds, options.memory = 2, 128, 256, 1, []
    checkpoint, runtime = Checkpoint.open(options.model), load(Path(options.model), device=options.device)
    mixers, device = checkpoint.mixers, runtime.device
    if options.trace_only:
        tokens = evaluation_windows(runtime.tokenizer, options.text, options.trace_only, options.trace_only).tokens
        trace_states(runtime, mixers, tokens)
        print(peak_memory_kib())
        return
    windows = sample_windows(runtime.tokenizer, options.data, samples=options.samples, length=options.length).tokens
    tokens = evaluation_windows(runtime.tokenizer, options.text, options.length, options.max_tokens).tokens
    needs = frozenset({"gram", "input", "gradient"})
    window_nats(runtime, tokens[:1])

    def parts() -> tuple[float, float]:
        calibration = seconds(device, lambda: calibrate(runtime, mixers, windows, needs))
        return calibration, seconds(device, lambda: window_nats(runtime, tokens))

    def run_sweep(folder: str) -> None:
        slimstate.sweep(
            options.model,
            folder,
            text=options.text,
            data=options.data,
            samples=options.samples,
            length=options.length,
            compressions=COMPRESSIONS,
            text_length=options.length,
            max_tokens=options.max_tokens,
            device=options.device,
        )

    before = parts()
    with tempfile.TemporaryDirectory() as folder:
        whole = seconds(device, lambda: run_sweep(folder))
    after = parts()
    calibration, evaluation = (statistics.mean(pair) for pair in zip(before, after, strict=True))
    ids = tokens[:1]
    times: dict[str, list[float]] = {"forward": [], "trace": []}
    for _ in range(options.rounds):
        with torch.inference_mode():
            run = lambda: runtime.model(input_ids=ids.to(device, torch.long), use_cache=False)  # noqa: E731
            times["forward"].append(seconds(device, run))
        times["trace"].append(seconds(device, lambda: trace_states(runtime, mixers, ids, skip=0)))
    medians = {name: statistics.median(values) for name, values in times.items()}
    record = {
        "model": options.model,
        "kernels": runtime.kernels,
        "versions": versions(),
        "calibration_tokens": windows.numel(),
        "evaluation_tokens": tokens.numel(),
        "sweep": {
            "calibration": calibration,
            "evaluation": evaluation,
            "sweep": whole,
            "ratio": whole / (calibration + 15 * evaluation),
        },
        "trace": {"tokens": ids.numel(), **medians, "ratio": medians["trace"] / medians["forward"]},
        "peak_memory_kib": {},
    }
    for length in options.memory:
        arguments_here = ["--trace-only", length, "--model", options.model, "--text", options.text, "--device", "cpu"]
        record["peak_memory_kib"][length] = int(last_line_of(__file__, *arguments_here))
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
