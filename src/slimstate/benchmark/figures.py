"""Draw one figure for each kind of benchmark, in the style of the reports."""

from collections.abc import Callable, Sequence
from math import nan
from typing import Any

from matplotlib.figure import Figure

from slimstate.benchmark.options import title
from slimstate.records.benchmark import BenchRecord, CalibrationRow, DecodeRow
from slimstate.records.numbers import dims_text
from slimstate.reports.plots.style import MUTED, PALETTE, new_figure, plain_log_ticks, styled

MAX_TICKS = 8
PANELS: list[tuple[str, Callable[[Any], float | None]]] = [
    ("speed, largest state = 1", lambda row: row.speedup),
    ("peak memory, largest state = 1", lambda row: row.memory_ratio),
]


def figure_of(record: BenchRecord) -> Figure:
    """Return the figure of a record, of the rows that were measured."""
    rows: list[Any] = [row for row in record.rows if not row.error]
    if record.bench == "calibrate":
        return draw_calibration(rows)
    return (draw_decoding if record.bench == "decode" else draw_key_dims)(rows, record.device)


@styled
def draw_key_dims(rows: Sequence[Any], device: str) -> Figure:
    """Draw speed-up and memory by key dim, a line for each model, mode and value dim."""
    has_memory = any(row.peak_bytes for row in rows)
    figure, panels = new_figure(5.2 * (1 + has_memory), 3.8, 1, 1 + has_memory, squeeze=False)
    key_dims = sorted({row.key_dim for row in rows}, reverse=True)
    groups = {(row.model, row.mode, row.value_dim): f"{title(row.model)}, {row.mode}" for row in rows}
    groups = {group: label + f", value dim {group[2]}" * (group[2] is not None) for group, label in groups.items()}
    for axes, (name, ratio) in zip(panels[0], PANELS, strict=False):
        for index, (group, label) in enumerate(groups.items()):
            line = [row for row in rows if (row.model, row.mode, row.value_dim) == group and ratio(row)]
            line.sort(key=lambda row: row.key_dim)
            axes.plot(
                [row.key_dim for row in line], [ratio(row) for row in line], "o-", markersize=4,
                color=PALETTE[index % len(PALETTE)], label=label,
            )  # fmt: skip
        axes.axhline(1, color=MUTED, linewidth=0.8)
        axes.set(xlabel="key dim", title=name)
        axes.set_xticks(key_dims[:: 1 + (len(key_dims) > MAX_TICKS)])
    panels[0][0].legend(fontsize=8)
    figure.supxlabel(device, fontsize=8, color=MUTED)
    return figure


@styled
def draw_decoding(rows: Sequence[DecodeRow], device: str) -> Figure:
    """Draw the time of a step by the number of sequences, measured and by the roofline."""
    figure, axes = new_figure(6.4, 4.2)
    groups = dict.fromkeys((row.model, row.key_dim, row.value_dim) for row in rows)
    for index, (model, key_dim, value_dim) in enumerate(groups):
        line = [row for row in rows if (row.model, row.key_dim, row.value_dim) == (model, key_dim, value_dim)]
        batches, color = [row.batch for row in line], PALETTE[index % len(PALETTE)]
        label = f"{title(model)}, {dims_text(key_dim, value_dim)}"
        axes.plot(batches, [1000 * row.time for row in line], "o-", markersize=4, color=color, label=label)
        rooflines = [nan if row.roofline_seconds is None else 1000 * row.roofline_seconds for row in line]
        axes.plot(batches, rooflines, ":", color=color)
    axes.set(xscale="log", yscale="log", xlabel="sequences", ylabel="ms per step")
    axes.set_title("a decoding step; dotted: weights and states at copy speed")
    plain_log_ticks(axes)
    batches = sorted({row.batch for row in rows})
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.supxlabel(device, fontsize=8, color=MUTED)
    return figure


@styled
def draw_calibration(rows: Sequence[CalibrationRow]) -> Figure:
    """Draw the seconds of each calibration and of the plain forward pass."""
    figure, axes = new_figure(5.2, 0.6 + 0.5 * max(2, len(rows)))
    positions = range(len(rows))
    axes.barh(positions, [row.time for row in rows], color=[MUTED, *[PALETTE[0]] * (len(rows) - 1)])
    for position, row in enumerate(rows):
        if row.times_forward is not None:
            axes.annotate(f" {row.times_forward:.2f}x", (row.time, position), va="center", fontsize=9)
    axes.set_yticks(positions, [row.method for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="seconds", title="calibration against a plain forward pass")
    return figure
