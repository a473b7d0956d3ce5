"""Compile the kernels of one case by running its benchmark once, without timing variants of kernels.

The arguments are the benchmark, the precision, and the settings of the case as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from slimstate.benchmark.bench import Bench
from slimstate.benchmark.decoding import time_decoding
from slimstate.benchmark.mixers import time_mixers
from slimstate.benchmark.models import time_models
from slimstate.benchmark.options import DecodeBenchConfig, MixerBenchConfig, ModelBenchConfig
from slimstate.kernels.autotune import judge_variants_by
from slimstate.models.options import RunOptions
from slimstate.records.benchmark import BenchRecord

BENCHES: dict[str, tuple[Any, Callable[[Any, Bench], BenchRecord]]] = {
    "mixer": (MixerBenchConfig, time_mixers), "model": (ModelBenchConfig, time_models),
    "decode": (DecodeBenchConfig, time_decoding),
}  # fmt: skip


def run_once(name: str, settings: str, run: RunOptions) -> BenchRecord:
    """Run the benchmark with the settings in a JSON text."""
    kind, time = BENCHES[name]
    return time(kind.from_values(json.loads(settings)), Bench.prepare(name, 1, run))


def _run_untimed(kernel: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    kernel()
    return [1.0 for _ in quantiles]


if __name__ == "__main__":
    judge_variants_by(_run_untimed)
    run_once(sys.argv[1], sys.argv[3], RunOptions.from_values({"device": "cuda", "dtype": sys.argv[2]}))
