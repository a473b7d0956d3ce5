"""Measure how the memory of a calibration grows with its windows, in a fresh process for each number of windows.

    python benchmarks/memory.py [--model MODEL --data TEXT --samples 16 128 --length 512 --device cpu]

`slimstate bench calibrate` measures the time of a calibration.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness import DEMO, arguments, last_line_of, peak_memory_kib

from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.text import sample_windows
from slimstate.models.load import load
from slimstate.pruning.calibration import calibrate


def peak(model: str, data: str, samples: int, length: int, device: str | None) -> int:
    """Return the peak memory of this process in KiB after one calibration for drrqr."""
    runtime = load(Path(model), device=device)
    windows = sample_windows(runtime.tokenizer, data, samples=samples, length=length).tokens
    calibrate(runtime, Checkpoint.open(model).mixers, windows, frozenset({"gram"}))
    return peak_memory_kib()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default=str(DEMO / "model"))
    parser.add_argument("--data", default=str(DEMO / "calibration.txt"))
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default=None)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.toy:
        options.samples, options.length, options.here = [2], 64, True
    if options.here:
        print(peak(options.model, options.data, options.samples[0], options.length, options.device))
        return
    peaks = {}
    for samples in options.samples:
        arguments_here = ["--here", "--model", options.model, "--data", options.data]
        arguments_here += ["--samples", samples, "--length", options.length]
        arguments_here += [] if options.device is None else ["--device", options.device]
        peaks[samples] = int(last_line_of(__file__, *arguments_here))
    print(json.dumps({"model": options.model, "length": options.length, "peak_kib": peaks}, indent=2))


if __name__ == "__main__":
    main()
