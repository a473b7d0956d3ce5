"""Compile the kernels of several widths at once, in processes of their own, before they are timed one by one.

Triton keeps what it compiled on disk. Tuning is left to the process that times: it runs every variant with the GPU to
itself, and finds them compiled, but for norms whose variants go by the number of rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slimstate.benchmark.recording import Bench
from slimstate.kernels.autotune import judge_variants_by

COMPILED_BATCH = 2  # sequences are enough to compile with, and leave a GPU to many processes


def compile_ahead(bench: Bench, cases: Sequence[Mapping[str, Any]], jobs: int) -> None:
    """Run each case once in a process, `jobs` of them at a time; nothing to do on a CPU or without jobs."""
    if bench.device.type != "cuda" or jobs < 1 or "SLIMSTATE_COMPILING" in os.environ:
        return
    bench.reporter.say(f"compiling {len(cases)} widths in {jobs} processes")
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        for case, done in zip(cases, pool.map(lambda case: _compile(bench, case, threads), cases), strict=True):
            if done.returncode:
                reason = (done.stderr.strip() or "it was killed").splitlines()[-1]
                bench.reporter.say(f"key dim {case['key_dims'][0]} is compiled later, when it is timed: {reason}")


def _compile(bench: Bench, case: Mapping[str, Any], threads: int) -> subprocess.CompletedProcess[str]:
    # the choice between variants is not kept: it was not made with the GPU to itself
    settings = os.environ | {"SLIMSTATE_COMPILING": str(threads), "FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}
    smaller = {"batch": min(case["batch"], COMPILED_BATCH)} if "batch" in case else {}
    options = {**case, **smaller, "device": "cuda", "dtype": str(bench.dtype).removeprefix("torch."), "rounds": 1}
    return subprocess.run(
        [sys.executable, "-m", "slimstate.benchmark.compiling", bench.verb, json.dumps(options)],
        env=settings, capture_output=True, text=True, check=False,
    )  # fmt: skip


def _run_once(kernel: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    kernel()
    return [1.0 for _ in quantiles]


if __name__ == "__main__":
    judge_variants_by(_run_once)
    import slimstate.benchmark

    getattr(slimstate.benchmark, f"bench_{sys.argv[1]}")(**json.loads(sys.argv[2]))
