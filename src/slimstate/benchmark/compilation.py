"""Compile the kernels of several key dims in parallel processes, before they are timed one by one.

Triton caches compiled kernels on disk. Tuning is left to the process that times: it runs every variant with the GPU to
itself, and finds the variants compiled, except those of norms that depend on the number of rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from slimstate.benchmark.bench import Bench
from slimstate.benchmark.options import ModelsBenchConfig

COMPILE_BATCH = 2  # sequences: enough to compile, and small enough for many processes on one GPU


def compile_ahead(bench: Bench, options: ModelsBenchConfig, cases: Iterable[tuple[str, int]]) -> None:
    """Run each case, a model at a key dim, once in a process of its own, `bench.jobs` at a time.

    Does nothing on a CPU or without jobs.
    """
    if bench.device.type != "cuda" or bench.jobs < 1 or "SLIMSTATE_COMPILING" in os.environ:
        return
    single = [replace(options, models=(model,), key_dims=(key_dim,)) for model, key_dim in cases]
    bench.reporter.say(f"compiling {len(single)} widths in {bench.jobs} processes")
    with ThreadPoolExecutor(bench.jobs) as pool:
        for case, process in zip(single, pool.map(lambda case: _compile(bench, case), single), strict=True):
            if process.returncode:
                reason = (process.stderr.strip() or "the process was killed").splitlines()[-1]
                key_dim = (case.key_dims or ("?",))[0]
                bench.reporter.say(f"key dim {key_dim} will be compiled when it is timed: {reason}")


def _compile(bench: Bench, case: ModelsBenchConfig) -> subprocess.CompletedProcess[str]:
    threads = max(1, len(os.sched_getaffinity(0)) // bench.jobs)
    # fla must not cache its choice of variants, which was not timed with the GPU to itself
    environment = os.environ | {"SLIMSTATE_COMPILING": str(threads), "FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}
    arguments = [bench.name, bench.dtype_name, json.dumps(case.settings)]
    return subprocess.run(
        [sys.executable, "-m", "slimstate.benchmark.compiling_process", *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
