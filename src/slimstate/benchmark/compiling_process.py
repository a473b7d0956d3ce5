"""What a process does that only compiles: one case of a benchmark, run once, with no variant of a kernel timed.

Its arguments are the benchmark, the precision, and the settings of the case as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from slimstate.benchmark.bench import Bench, BenchOptions
from slimstate.benchmark.decoding import time_decoding
from slimstate.benchmark.mixers import time_mixers
from slimstate.benchmark.models import time_models
from slimstate.kernels.autotune import judge_variants_by
from slimstate.models.options import RunOptions
from slimstate.records.benchmark import BenchRecord, DecodeSettings, MixerSettings, ModelSettings
from slimstate.records.schema import read


def run_once(verb: str, settings: str, run: RunOptions) -> BenchRecord:
    """A benchmark of the settings in a JSON text."""
    bench, data = Bench.begin(verb, BenchOptions(rounds=1), run), json.loads(settings)
    if verb == "mixer":
        return time_mixers(read(MixerSettings, data), bench)
    if verb == "model":
        return time_models(read(ModelSettings, data), bench)
    return time_decoding(read(DecodeSettings, data), bench)


def _untimed(kernel: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    kernel()
    return [1.0 for _ in quantiles]


if __name__ == "__main__":
    judge_variants_by(_untimed)
    run_once(sys.argv[1], sys.argv[3], RunOptions(device="cuda", dtype=sys.argv[2]))
