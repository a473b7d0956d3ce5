"""Compile the kernels of several key dims in parallel processes, before they are timed one by one.

Triton caches compiled kernels on disk. Tuning is left to the process that times: it runs every variant with the GPU to
itself, and finds the variants compiled, except those of norms that depend on the number of rows.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from slimstate.benchmark.bench import Bench
from slimstate.benchmark.options import ModelsBenchConfig
from slimstate.records.provenance import command_line, run_config

COMPILE_BATCH = 2  # sequences: enough to compile, and small enough for many processes on one GPU


def compile_ahead(bench: Bench, options: ModelsBenchConfig, cases: Iterable[tuple[str, int]]) -> None:
    """Run the command of each case, a model at a key dim, once in a process of its own, `jobs` at a time.

    Does nothing on a CPU or without jobs.
    """
    if bench.device.type != "cuda" or options.jobs < 1:
        return
    threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
    # fla must not cache its choice of variants, which was not timed with the GPU to itself
    environment = os.environ | {"SLIMSTATE_COMPILING": str(threads), "FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}

    def run(case: tuple[str, int]) -> subprocess.CompletedProcess[str]:
        config = replace(options, models=(case[0],), key_dims=(case[1],), rounds=1, jobs=0)
        words = shlex.split(command_line(run_config(f"bench {bench.name}", {}, config.to_values())))
        return subprocess.run(
            [sys.executable, "-m", *words], env=environment, capture_output=True, text=True, check=False
        )  # fmt: skip

    cases = list(cases)
    bench.reporter.say(f"compiling {len(cases)} widths in {options.jobs} processes")
    with ThreadPoolExecutor(options.jobs) as pool:
        for (_, key_dim), process in zip(cases, pool.map(run, cases), strict=True):
            if process.returncode:
                reason = (process.stderr.strip() or "the process was killed").splitlines()[-1]
                bench.reporter.say(f"key dim {key_dim} will be compiled when it is timed: {reason}")
