"""Time layers, models, decoding and calibration at several key dims: one function for each benchmark.

Every function returns a record whose `rows` have medians, spread, peak memory and ratios to the widest key dim, all
from one run on one device; with `out` it is written to that folder with its tables and a figure.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from slimstate.benchmark.bench import Bench
from slimstate.benchmark.calibration import time_calibration
from slimstate.benchmark.decoding import time_decoding
from slimstate.benchmark.options import (
    BenchConfig,
    CalibrateBenchConfig,
    DecodeBenchConfig,
    MixerBenchConfig,
    ModelBenchConfig,
)
from slimstate.benchmark.passes import time_mixers, time_models
from slimstate.benchmark.random_models import library_of
from slimstate.benchmark.tables import check_output, write_output
from slimstate.families.contract import Library
from slimstate.records import benchmark as records
from slimstate.records.provenance import run_config
from slimstate.system.errors import PlanError
from slimstate.system.options import as_path
from slimstate.workflows.inputs import Progress, reporter_for

B = TypeVar("B", bound=records.BenchRecord)


def bench_mixer(
    config: MixerBenchConfig | None = None, *, out: str | Path | None = None, progress: Progress = True, **options: Any
) -> records.MixerRecord:
    """Time linear-attention layers by themselves, forward and in training.

    The default sizes are those that the paper names; choose small ones on a CPU. The paper's released code has 4096
    tokens and no output gate (recipes/throughput.toml).

    Parameters:
        out: Folder for the record, the tables and the figure.

    Examples:
        >>> slimstate.bench_mixer(models=["delta_net"], key_dims=[128, 64], batch=1, length=256).to_dataframe()
    """
    return _run("mixer", MixerBenchConfig.merge(config, options), time_mixers, out, progress)


def bench_model(
    config: ModelBenchConfig | None = None, *, out: str | Path | None = None, progress: Progress = True, **options: Any
) -> records.ModelRecord:
    """Time prefill, forward pass or training step of whole models; random weights, but for a folder at its own key dim.

    Parameters:
        out: Folder for the record, the tables and the figure.

    Examples:
        >>> slimstate.bench_model(models=["delta_net-5m"], batch=1, length=256).to_dataframe()
    """
    config = ModelBenchConfig.merge(config, options)
    return _run("model", config, time_models, out, progress, library=library_of(config.models))


def bench_decode(
    config: DecodeBenchConfig | None = None, *, out: str | Path | None = None, progress: Progress = True, **options: Any
) -> records.DecodeRecord:
    """Time one more token for each of many sequences against the bandwidth of the device, and find the largest batch.

    Parameters:
        out: Folder for the record, the tables and the figure.

    Examples:
        >>> slimstate.bench_decode(models=["delta_net-5m"], key_dims=[128, 64], batches=[1, 8]).to_dataframe()
    """
    config = DecodeBenchConfig.merge(config, options)
    if not config.batches:
        raise PlanError("`batches` must name at least one batch")
    if library_of(config.models) != "fla":
        raise PlanError("`models` must be of flash-linear-attention: decoding reads the states from its cache")
    return _run("decode", config, time_decoding, out, progress)


def bench_calibrate(
    config: CalibrateBenchConfig | None = None, *,
    out: str | Path | None = None, progress: Progress = True, **options: Any,
) -> records.CalibrationRecord:  # fmt: skip
    """Time the calibration of each method against a plain forward pass, and the selection; configs get random weights.

    Parameters:
        out: Folder for the record, the tables and the figure.

    Examples:
        >>> slimstate.bench_calibrate(model="delta_net-5m", samples=4, length=256).to_dataframe()
    """
    config = CalibrateBenchConfig.merge(config, options)
    return _run("calibrate", config, time_calibration, out, progress, library=library_of([config.model]))


def _run(
    name: str, config: BenchConfig, measure: Callable[[Any, Bench], B], out: str | Path | None, progress: Progress, *,
    library: Library = "fla",
) -> B:  # fmt: skip
    """Measure, put the config into the record, and write it where there is a folder for it."""
    folder = None if out is None else as_path(out)
    if folder is not None:
        check_output(folder, name)
    bench = Bench.prepare(name, config, library=library, reporter=reporter_for(progress))
    values = {**config.to_values(), "out": folder}
    record = replace(measure(config, bench), config=run_config(f"bench {name}", {}, values))
    if folder is not None:
        write_output(record, folder)
    return record
