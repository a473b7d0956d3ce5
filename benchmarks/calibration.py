"""What calibration costs beyond a plain forward pass over the same tokens, and how its memory grows with them.

    python benchmarks/calibration.py --model MODEL --data TEXT [--samples 16 --length 1024 --device cpu]

Forward and calibration take turns in one process, so that a noisy machine slows both. Peak memory is read in fresh
processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from timing import DEMO, peak_memory_kib, seconds

from slimstate.benchmark.calibrating import forward
from slimstate.calibration import calibrate
from slimstate.checkpoint import Checkpoint
from slimstate.data import sample_windows
from slimstate.runtime import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO / "model"))
    parser.add_argument("--data", default=str(DEMO / "calibration.txt"))
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, nargs="*", default=[16, 64], help="samples at which peak memory is read")
    parser.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.toy:
        options.samples, options.length, options.rounds, options.memory = 2, 64, 1, []
    checkpoint, runtime = Checkpoint.open(options.model), load(Path(options.model), device=options.device)
    windows = sample_windows(runtime.tokenizer, options.data, samples=options.samples, length=options.length).tokens
    mixers = checkpoint.mixers
    if options.memory_only:
        calibrate(runtime, mixers, windows, frozenset({"gram"}))
        print(peak_memory_kib())
        return
    forward(runtime, windows[:1])
    needs = {"drrqr": frozenset({"gram"}), "s-wanda": frozenset({"input"}), "grad": frozenset({"gradient"})}
    times: dict[str, list[float]] = {"forward": [], **{name: [] for name in needs}}
    for _ in range(options.rounds):
        times["forward"].append(seconds(runtime.device, lambda: forward(runtime, windows)))
        for name, need in needs.items():
            times[name].append(seconds(runtime.device, lambda need=need: calibrate(runtime, mixers, windows, need)))
    medians = {name: statistics.median(values) for name, values in times.items()}
    record = {
        "model": options.model,
        "tokens": windows.numel(),
        "kernels": runtime.kernels,
        "seconds": medians,
        "ratio_to_forward": {name: value / medians["forward"] for name, value in medians.items()},
        "peak_memory_kib": {},
    }
    for samples in options.memory:
        command = [sys.executable, __file__, "--memory-only", "--model", options.model, "--data", options.data]
        command += ["--samples", str(samples), "--length", str(options.length), "--device", "cpu"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        record["peak_memory_kib"][samples] = int(done.stdout)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
