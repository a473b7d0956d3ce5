"""Time a whole `prune` against loading the model and running it over the same tokens, each in its own process.

    python benchmarks/pipeline.py [--model delta_net-1.3b --samples 128 --length 2048 --device cuda --rounds 3]

The model has random weights. All take turns, once to compile kernels and warm the disk's cache and then `--rounds`
times; the record has the run of each with the median seconds, without starting Python and importing, and the peak
memory of the process and of the GPU. The parts of a prune are the steps that it reports, and the time before each.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import DEMO, StepTimer, add_tokenizer, arguments, last_line_of, peak_memory_kib

from slimstate import prune
from slimstate.benchmark.calibration import run_forward
from slimstate.benchmark.random_models import config_of, random_model
from slimstate.benchmark.timing import device_name
from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.text import sample_windows
from slimstate.models.devices import pick_device
from slimstate.models.load import load
from slimstate.models.prepare import prepare_fla

TOY = {
    "model_type": "delta_net", "hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 8192,
}  # fmt: skip

KINDS = ("forward", "drrqr", "grad")


class Stopwatch(StepTimer):
    """Times every step that a prune reports, and the time before it."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.last = time.perf_counter()

    def add_step(self, label: str, start: float) -> None:
        label, now = label.split("/", maxsplit=1)[0].strip(), time.perf_counter()
        for part, seconds in ((f"before {label}", start - self.last), (label, now - start)):
            self.parts[part] = self.parts.get(part, 0.0) + seconds
        self.last = now


def make_inputs(config: dict, folder: Path, device: torch.device, tokens: int) -> None:
    """Write the checkpoint, with the bundled tokenizer, and a text of at least this many tokens."""
    random_model(config, device, torch.bfloat16).save_pretrained(folder / "model", max_shard_size="1GB")
    add_tokenizer(folder / "model")
    lines = (DEMO / "calibration.txt").read_text(encoding="utf-8").splitlines()
    shuffled, text = random.Random(0), []
    while sum(map(len, text)) < 8 * tokens:
        shuffled.shuffle(lines)
        text.append("\n".join(lines))
    (folder / "text.txt").write_text("\n".join(text), encoding="utf-8")


def run(what: str, folder: Path, options: argparse.Namespace) -> dict[str, float | None]:
    """Run one of the kinds in this process and return its seconds, parts and peaks."""
    prepare_fla()
    device = pick_device(options.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)
    model, text, out = folder / "model", str(folder / "text.txt"), folder / what
    shutil.rmtree(out, ignore_errors=True)
    parts: dict[str, float | None] = {}
    start = time.perf_counter()
    if what == "forward":
        runtime = load(model, device=options.device)
        parts["loading"] = time.perf_counter() - start
        tokens = sample_windows(runtime.tokenizer, text, samples=options.samples, length=options.length).tokens
        parts["reading text"] = time.perf_counter() - start - parts["loading"]
        run_forward(runtime, tokens[: options.samples // 8])  # compiles kernels
        forward_start = time.perf_counter()
        run_forward(runtime, tokens)
        if device.type == "cuda":
            torch.cuda.synchronize()
        parts["forward"] = time.perf_counter() - forward_start
    else:
        key_dim = Checkpoint.open(model).mixers[0].axis.width // 2
        watch = Stopwatch()
        calibration = {"data": text, "samples": options.samples, "length": options.length}
        prune(model, out, method=what, key_dim=key_dim, **calibration, device=options.device, progress=watch)
        parts |= {**watch.parts, "after all": time.perf_counter() - watch.last}
    return {
        "seconds": time.perf_counter() - start,
        **parts,
        "host_peak_bytes": 1024 * peak_memory_kib(),
        "gpu_peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="delta_net-1.3b")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", default=None)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if options.only:
        print(json.dumps(run(options.only[0], Path(options.only[1]), options)))
        return
    config = TOY if options.toy else config_of(options.model)
    if options.toy:
        options.samples, options.length, options.rounds = 8, 64, 1
    device = pick_device(options.device)
    record: dict[str, Any] = {
        "device": device_name(device),
        "model": "toy" if options.toy else options.model,
        "samples": options.samples,
        "length": options.length,
    }
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(config, Path(folder), device, options.samples * options.length)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        runs: dict[str, list[dict[str, Any]]] = {what: [] for what in options.kinds}
        for turn, what in product(range(1 if options.toy else 0, 1 + options.rounds), runs):
            arguments_here = ["--samples", options.samples, "--length", options.length, "--device", device.type]
            result = json.loads(last_line_of(__file__, "--only", what, folder, *arguments_here))
            runs[what] += [result] if turn else []
            print(f"{what}{'' if turn else ', to warm up'}: {json.dumps(result)}", file=sys.stderr, flush=True)
    for what, results in runs.items():
        ordered = sorted(results, key=lambda entry: entry["seconds"])
        record[what] = {**ordered[len(ordered) // 2], "all_seconds": [entry["seconds"] for entry in results]}
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
