"""One figure for each kind of benchmark, in the house style."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.figure import Figure

from slimstate.benchmark.subjects import in_words
from slimstate.report.plots import MUTED, PALETTE, new_figure, plain_log_ticks, styled

Record = Mapping[str, Any]
MANY_TICKS = 8


def figure_of(record: Record) -> Figure:
    figure: Figure = {"decode": decoding, "calibrate": calibrating}.get(record["bench"], widths)(record)
    return figure


def _measured(record: Record) -> list[Mapping[str, Any]]:
    return [row for row in record["rows"] if not row["error"]]


@styled
def widths(record: Record) -> Figure:
    """Speed-up and memory by key dim, a line for each model and mode."""
    has_memory = any(row["peak_bytes"] for row in _measured(record))
    figure, panels = new_figure(5.2 * (1 + has_memory), 3.8, 1, 1 + has_memory, squeeze=False)
    groups = dict.fromkeys((row["model"], row["mode"]) for row in _measured(record))
    fields = [("speedup", "speed, widest key dim = 1"), ("memory_ratio", "peak memory, widest key dim = 1")]
    for axes, (field, title) in zip(panels[0], fields, strict=False):
        for place, (model, mode) in enumerate(groups):
            rows = [row for row in _measured(record) if (row["model"], row["mode"]) == (model, mode) and row[field]]
            rows.sort(key=lambda row: row["key_dim"])
            axes.plot(
                [row["key_dim"] for row in rows], [row[field] for row in rows], "o-", markersize=4,
                color=PALETTE[place % len(PALETTE)], label=f"{in_words(model)}, {mode}",
            )  # fmt: skip
        axes.axhline(1, color=MUTED, linewidth=0.8)
        axes.set(xlabel="key dim", title=title)
        axes.set_xticks(_ticks({row["key_dim"] for row in _measured(record)}))
    panels[0][0].legend(fontsize=8)
    figure.supxlabel(record["device"], fontsize=8, color=MUTED)
    return figure


def _ticks(key_dims: Iterable[int]) -> list[int]:
    """Of key dims the widest, and every one of the others or every second of many."""
    narrowing = sorted(key_dims, reverse=True)
    return narrowing[:: 1 + (len(narrowing) > MANY_TICKS)]


@styled
def decoding(record: Record) -> Figure:
    """Time of a step by the number of sequences, measured and by the roofline."""
    figure, axes = new_figure(6.4, 4.2)
    groups = dict.fromkeys((row["model"], row["key_dim"]) for row in _measured(record))
    for place, (model, key_dim) in enumerate(groups):
        rows = [row for row in _measured(record) if (row["model"], row["key_dim"]) == (model, key_dim)]
        batches, tone = [row["batch"] for row in rows], PALETTE[place % len(PALETTE)]
        label = f"{in_words(model)}, key dim {key_dim}"
        axes.plot(batches, [1000 * row["seconds"] for row in rows], "o-", markersize=4, color=tone, label=label)
        axes.plot(batches, [1000 * row["roofline_seconds"] for row in rows], ":", color=tone)
    axes.set(xscale="log", yscale="log", xlabel="sequences", ylabel="ms per step")
    axes.set_title("a decoding step; dotted: weights and states at copy speed")
    plain_log_ticks(axes)
    batches = sorted({row["batch"] for row in _measured(record)})
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.supxlabel(record["device"], fontsize=8, color=MUTED)
    return figure


@styled
def calibrating(record: Record) -> Figure:
    """Seconds of calibration beside those of the plain forward pass."""
    rows = _measured(record)
    figure, axes = new_figure(5.2, 0.6 + 0.5 * max(2, len(rows)))
    places = range(len(rows))
    axes.barh(places, [row["seconds"] for row in rows], color=[MUTED, *[PALETTE[0]] * (len(rows) - 1)])
    for place, row in enumerate(rows):
        axes.annotate(f" {row['times_forward']:.2f}x", (row["seconds"], place), va="center", fontsize=9)
    axes.set_yticks(places, [row["method"] for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="seconds", title="calibration against a plain forward pass")
    return figure
