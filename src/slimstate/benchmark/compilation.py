"""Compile the kernels of several widths at once, in processes of their own, before they are timed one by one.

Triton keeps what it compiled on disk. Tuning is left to the process that times: it runs every variant with the GPU to
itself, and finds them compiled, but for norms whose variants go by the number of rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from slimstate.benchmark.bench import Bench
from slimstate.records.benchmark import Subjects
from slimstate.records.schema import written

COMPILED_BATCH = 2  # sequences are enough to compile with, and leave a GPU to many processes


def compile_ahead(bench: Bench, cases: Sequence[Subjects]) -> None:
    """Run each case, settings of one model at one key dim, once in a process; several processes at a time.

    Nothing to do on a CPU, or without jobs.
    """
    jobs = bench.options.jobs
    if bench.device.type != "cuda" or jobs < 1 or "SLIMSTATE_COMPILING" in os.environ:
        return
    bench.reporter.say(f"compiling {len(cases)} widths in {jobs} processes")
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        for case, done in zip(cases, pool.map(lambda case: _compile(bench, case, threads), cases), strict=True):
            if done.returncode:
                reason = (done.stderr.strip() or "it was killed").splitlines()[-1]
                key_dim = (case.key_dims or ("?",))[0]
                bench.reporter.say(f"key dim {key_dim} is compiled later, when it is timed: {reason}")


def _compile(bench: Bench, case: Subjects, threads: int) -> subprocess.CompletedProcess[str]:
    # the choice between variants is not kept: it was not made with the GPU to itself
    settings = os.environ | {"SLIMSTATE_COMPILING": str(threads), "FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}
    words = [bench.verb, bench.run.precision_name, json.dumps(written(case))]
    return subprocess.run(
        [sys.executable, "-m", "slimstate.benchmark.compiling_process", *words],
        env=settings, capture_output=True, text=True, check=False,
    )  # fmt: skip
