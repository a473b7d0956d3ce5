"""One figure for each kind of benchmark, in the house style."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import nan

from matplotlib.figure import Figure

from slimstate.benchmark.tables import title
from slimstate.records.benchmark import (
    BenchRecord,
    CalibrationRecord,
    CalibrationRow,
    DecodeRecord,
    DecodeRow,
    KernelRow,
    MixerRow,
    ModelRow,
)
from slimstate.report.plots import MUTED, PALETTE, new_figure, plain_log_ticks, styled

MANY_TICKS = 8
ModeRow = MixerRow | ModelRow | KernelRow
PANELS: list[tuple[str, Callable[[ModeRow], float | None]]] = [
    ("speed, widest key dim = 1", lambda row: row.speedup),
    ("peak memory, widest key dim = 1", lambda row: row.memory_ratio),
]


def figure_of(record: BenchRecord) -> Figure:
    rows = [row for row in record.rows if not row.error]
    if isinstance(record, DecodeRecord):
        figure: Figure = decoding([row for row in rows if isinstance(row, DecodeRow)], record.device)
    elif isinstance(record, CalibrationRecord):
        figure = calibration([row for row in rows if isinstance(row, CalibrationRow)])
    else:
        figure = widths([row for row in rows if isinstance(row, ModeRow)], record.device)
    return figure


@styled
def widths(measured: list[ModeRow], device: str) -> Figure:
    """Speed-up and memory by key dim, a line for each model and mode."""
    has_memory = any(row.peak_bytes for row in measured)
    figure, panels = new_figure(5.2 * (1 + has_memory), 3.8, 1, 1 + has_memory, squeeze=False)
    groups = dict.fromkeys((row.model, row.mode) for row in measured)
    for axes, (name, ratio) in zip(panels[0], PANELS, strict=False):
        for place, (model, mode) in enumerate(groups):
            rows = [row for row in measured if (row.model, row.mode) == (model, mode) and ratio(row)]
            rows.sort(key=lambda row: row.key_dim)
            axes.plot(
                [row.key_dim for row in rows], [ratio(row) for row in rows], "o-", markersize=4,
                color=PALETTE[place % len(PALETTE)], label=f"{title(model)}, {mode}",
            )  # fmt: skip
        axes.axhline(1, color=MUTED, linewidth=0.8)
        axes.set(xlabel="key dim", title=name)
        axes.set_xticks(_ticks({row.key_dim for row in measured}))
    panels[0][0].legend(fontsize=8)
    figure.supxlabel(device, fontsize=8, color=MUTED)
    return figure


def _ticks(key_dims: Iterable[int]) -> list[int]:
    """Of key dims the widest, and every one of the others or every second of many."""
    narrowing = sorted(key_dims, reverse=True)
    return narrowing[:: 1 + (len(narrowing) > MANY_TICKS)]


@styled
def decoding(measured: list[DecodeRow], device: str) -> Figure:
    """Time of a step by the number of sequences, measured and by the roofline."""
    figure, axes = new_figure(6.4, 4.2)
    for place, (model, key_dim) in enumerate(dict.fromkeys((row.model, row.key_dim) for row in measured)):
        rows = [row for row in measured if (row.model, row.key_dim) == (model, key_dim)]
        batches, tone = [row.batch for row in rows], PALETTE[place % len(PALETTE)]
        label = f"{title(model)}, key dim {key_dim}"
        axes.plot(batches, [_milliseconds(row.seconds) for row in rows], "o-", markersize=4, color=tone, label=label)
        axes.plot(batches, [_milliseconds(row.roofline_seconds) for row in rows], ":", color=tone)
    axes.set(xscale="log", yscale="log", xlabel="sequences", ylabel="ms per step")
    axes.set_title("a decoding step; dotted: weights and states at copy speed")
    plain_log_ticks(axes)
    batches = sorted({row.batch for row in measured})
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.supxlabel(device, fontsize=8, color=MUTED)
    return figure


def _milliseconds(seconds: float | None) -> float:
    """Not a number is a gap in a line."""
    return nan if seconds is None else 1000 * seconds


@styled
def calibration(measured: list[CalibrationRow]) -> Figure:
    """Seconds of calibration beside those of the plain forward pass."""
    figure, axes = new_figure(5.2, 0.6 + 0.5 * max(2, len(measured)))
    places = range(len(measured))
    axes.barh(places, [row.time for row in measured], color=[MUTED, *[PALETTE[0]] * (len(measured) - 1)])
    for place, row in enumerate(measured):
        if row.times_forward is not None:
            axes.annotate(f" {row.times_forward:.2f}x", (row.time, place), va="center", fontsize=9)
    axes.set_yticks(places, [row.method for row in measured])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="seconds", title="calibration against a plain forward pass")
    return figure
