"""How fast models are at every key dim, by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slimstate.api.progress import Progress, reporter_of
from slimstate.benchmark import BenchOptions, MixerShape
from slimstate.benchmark.calibration import METHODS
from slimstate.benchmark.calibration import USUAL as CALIBRATED
from slimstate.benchmark.calibration import bench_calibrate as time_calibration
from slimstate.benchmark.decoding import BATCHES
from slimstate.benchmark.decoding import USUAL as DECODED
from slimstate.benchmark.decoding import bench_decode as time_decoding
from slimstate.benchmark.mixers import PAPER, PAPER_SHAPE
from slimstate.benchmark.mixers import USUAL as OF_MIXERS
from slimstate.benchmark.mixers import bench_mixer as time_mixers
from slimstate.benchmark.models import USUAL as OF_MODELS
from slimstate.benchmark.models import bench_model as time_models
from slimstate.models.options import RunOptions
from slimstate.pruning.options import Calibration
from slimstate.records.benchmark import (
    CalibrationRecord,
    DecodeRecord,
    MixerRecord,
    MixerSettings,
    ModelRecord,
    ModelSettings,
)


def bench_mixer(
    models: Sequence[str] = PAPER,
    key_dims: Sequence[int] = (128, 64, 32),
    *,
    shape: MixerShape = PAPER_SHAPE,
    modes: Sequence[str] = MixerSettings.MODES,
    options: BenchOptions = OF_MIXERS,
    run: RunOptions | None = None,
    out: str | Path | None = None,
    progress: Progress = True,
) -> MixerRecord:
    """Time linear-attention layers by themselves, at several key dims.

    Parameters:
        models: model types of flash-linear-attention.
        key_dims: the key dims to time.
        shape: batch, length and sizes; by default those of the paper.
        modes: "forward", "train" or both.
        options: how often to time.
        run: device and precision.
        out: a folder for the record, tables and a figure.
        progress: whether to show it; or a `Reporter` of your own.

    Returns:
        A record whose `rows` have medians, spread, peak memory and ratios to the widest key dim.

    Examples:
        >>> small = slimstate.MixerShape(batch=1, length=256, hidden=256, heads=2)
        >>> slimstate.bench_mixer(["delta_net"], [128, 64], shape=small).to_dataframe()
    """
    return time_mixers(
        models, key_dims, shape=shape, modes=modes, options=options, run=run, out=out, reporter=reporter_of(progress)
    )


def bench_model(
    models: Sequence[str] = ("delta_net-370m",),
    key_dims: Sequence[int] | None = None,
    *,
    batch: int = 8,
    length: int = 2048,
    modes: Sequence[str] = ModelSettings.MODES,
    options: BenchOptions = OF_MODELS,
    run: RunOptions | None = None,
    out: str | Path | None = None,
    progress: Progress = True,
) -> ModelRecord:
    """Time whole models at several key dims, with random weights.

    Parameters:
        models: folders, config files, or shapes that come with slimstate.
        key_dims: the key dims to time; by default the width and its halves.
        batch: sequences at once.
        length: tokens in each.
        modes: "prefill", "train", "forward".
        options: how often to time.
        run: device and precision.
        out: a folder for the record, tables and a figure.
        progress: whether to show it; or a `Reporter` of your own.

    Returns:
        A record whose `rows` have medians, spread, peak memory and ratios to the widest key dim.

    Examples:
        >>> slimstate.bench_model(["delta_net-5m"], batch=1, length=256).to_dataframe()
    """
    return time_models(
        models, key_dims, batch=batch, length=length, modes=modes, options=options, run=run, out=out,
        reporter=reporter_of(progress),
    )  # fmt: skip


def bench_decode(
    models: Sequence[str] = ("delta_net-1.3b",),
    key_dims: Sequence[int] | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    options: BenchOptions = DECODED,
    run: RunOptions | None = None,
    out: str | Path | None = None,
    progress: Progress = True,
) -> DecodeRecord:
    """Time one decoding step for many sequences, and find the most that fit.

    Parameters:
        models: folders, config files, or shapes that come with slimstate.
        key_dims: the key dims to time; by default the width and its halves.
        batches: numbers of sequences.
        options: how often to time.
        run: device and precision.
        out: a folder for the record, tables and a figure.
        progress: whether to show it; or a `Reporter` of your own.

    Returns:
        A record whose `rows` have medians, spread, the share of the memory bandwidth, and ratios.

    Examples:
        >>> slimstate.bench_decode(["delta_net-5m"], [128, 64], batches=[1, 8]).to_dataframe()
    """
    return time_decoding(
        models, key_dims, batches=batches, options=options, run=run, out=out, reporter=reporter_of(progress)
    )


def bench_calibrate(
    model: str = "delta_net-1.3b",
    *,
    methods: Sequence[str] = METHODS,
    key_dim: int | None = None,
    calibration: Calibration | str | Path | None = None,
    options: BenchOptions = CALIBRATED,
    run: RunOptions | None = None,
    out: str | Path | None = None,
    progress: Progress = True,
) -> CalibrationRecord:
    """Time calibration and the choice of channels against a plain forward pass.

    Parameters:
        model: a folder, a config file, or a shape that comes with slimstate, which gets random weights.
        methods: the methods to time.
        key_dim: channels to keep; by default half.
        calibration: a file of text, or a `Calibration`; without a text random tokens are read.
        options: how often to time.
        run: device and precision.
        out: a folder for the record and tables.
        progress: whether to show it; or a `Reporter` of your own.

    Returns:
        A record whose `rows` have medians, spread and the ratio to a forward pass.

    Examples:
        >>> short = slimstate.Calibration(samples=4, length=256)
        >>> slimstate.bench_calibrate("delta_net-5m", calibration=short).to_dataframe()
    """
    return time_calibration(
        model, methods=methods, key_dim=key_dim, calibration=calibration, options=options, run=run, out=out,
        reporter=reporter_of(progress),
    )  # fmt: skip
