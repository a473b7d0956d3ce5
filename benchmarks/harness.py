"""Shared by the benchmarks: the bundled model and its tokenizer, timing on any device, and separate processes."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slimstate.system.progress import Reporter

DEMO = Path(__file__).parent.parent / "demo"


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script; with --toy the script runs at a size that takes seconds."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="run at a size that takes seconds, as a test of the script")
    return parser


class StepTimer(Reporter):
    """Time every step that a command reports; subclasses define `add_step`."""

    def add_step(self, label: str, start: float) -> None:
        """Add a step that started at a time of `time.perf_counter` and ends now."""
        raise NotImplementedError

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add_step(label, start)

    def track(self, items: Iterable[Any], label: str, total: int | None = None, tokens: float = 0) -> Iterator[Any]:
        start = time.perf_counter()
        yield from items
        self.add_step(label, start)


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_memory_kib() -> int:
    """Return the peak memory of this process; getrusage would count the parent it was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def last_line_of(script: str, *arguments: object) -> str:
    """Run a script in a process with its own peak memory and return the last line it prints; exit if it fails."""
    process = subprocess.run(
        [sys.executable, script, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=False
    )
    if process.returncode:
        sys.exit(process.returncode)
    return process.stdout.splitlines()[-1]


def add_tokenizer(model: Path) -> None:
    """Copy the tokenizer of the bundled model to a model with random weights."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "model" / name, model / name)
