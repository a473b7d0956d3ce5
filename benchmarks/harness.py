"""What the benchmarks share: the bundled model and its tokenizer, timing on any device, and processes of their own."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

DEMO = Path(__file__).parent.parent / "demo"


def arguments(about: str | None) -> argparse.ArgumentParser:
    """The parser of a script that says what it does, and does a little of it in seconds when asked for a toy."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="at a size that takes seconds, to see that it runs")
    return parser


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def peak_memory_kib() -> int:
    """Of this process since it began; getrusage would count the parent it was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def last_line_of(script: str, *words: object) -> str:
    """What a script prints last in a process of its own, which has its own peak of memory; ends where that fails."""
    done = subprocess.run([sys.executable, script, *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.splitlines()[-1]


def add_tokenizer(model: Path) -> None:
    """That of the bundled model, for one with random weights."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "model" / name, model / name)
