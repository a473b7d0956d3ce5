"""Figures of what `analyze` found: how states are used over time and by head, their spectra, their filters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from slimstate.records.states import Bounds, FiltersRecord, TraceRecord
from slimstate.report.plots.style import INK, MUTED, colours_of, label_of, literal, new_figure, save, styled
from slimstate.system.errors import PlanError

STATES_DRAWN = 400  # of one model, spread evenly: more of them no eye can tell apart


@styled
def utilisation_curves(traces: Sequence[TraceRecord]) -> Figure:
    """Rank utilisation against the token index, averaged over layers and heads, all models in one figure."""
    figure, axes = new_figure(7, 3.8)
    for trace, shade in zip(traces, colours_of(traces), strict=True):
        axes.plot(trace.times, trace.curve, color=shade, linewidth=2, label=literal(label_of(trace)))
    axes.set(xlabel="token index", ylabel="rank utilisation u(S)", title="How much of the state is used")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend()
    return figure


def median_head(trace: TraceRecord) -> tuple[int, int]:
    """The layer and the head whose utilisation is the median one."""
    rows = zip(trace.layers, trace.utilisation_by_head, strict=True)
    by_head = [(value, layer, head) for layer, row in rows for head, value in enumerate(row)]
    _, layer, head = sorted(by_head)[len(by_head) // 2]
    return layer, head


def find_head(layers: Sequence[int], heads: int, head: str) -> tuple[int, int]:
    """The layer and the head that LAYER:HEAD names, of these layers and so many heads."""
    layer, _, number = head.partition(":")
    if not (layer.isdecimal() and number.isdecimal()):
        raise PlanError(f"`head` {head}: give LAYER:HEAD, for example {layers[0]}:0")
    if int(layer) not in layers or int(number) >= heads:
        raise PlanError(f"`head` {head}: linear layers are {', '.join(map(str, layers))}, heads 0 to {heads - 1}")
    return int(layer), int(number)


def having_head(traces: Sequence[TraceRecord], head: str | None) -> tuple[list[TraceRecord], int, int]:
    """The traces that have this layer and head, a typical one of the first by default, and their numbers."""
    first = traces[0]
    layer, number = median_head(first) if head is None else find_head(first.layers, first.heads, head)
    return [trace for trace in traces if layer in trace.layers and number < trace.heads], layer, number


@styled
def spectra(traces: Sequence[TraceRecord], head: str | None = None) -> Figure:
    """The singular values of one head's states over all tokens but the first, as histograms one above the other.

    Models that have no such head are left out.
    """
    traces, layer, number = having_head(traces, head)
    figure, grid = new_figure(7, 1.1 + 1.35 * len(traces), len(traces), sharex=True, squeeze=False)
    lows, highs = [], []
    for axes, trace, shade in zip(grid[:, 0], traces, colours_of(traces), strict=True):
        histogram = trace.histogram
        counts = histogram.counts[trace.layers.index(layer)][number]
        step = (histogram.high - histogram.low) / len(counts)
        left = [histogram.low + step * i for i in range(len(counts))]
        total = sum(counts)
        filled = [x for x, count in zip(left, counts, strict=True) if count]
        lows.append(min(filled))
        highs.append(max(filled))
        axes.bar(left, [count / total / step for count in counts], width=step, align="edge", color=shade, linewidth=0)
        axes.set_ylabel("density")
        axes.set_title(literal(label_of(trace)), fontsize=10, fontweight="normal")
        axes.yaxis.set_major_locator(MaxNLocator(3))
    last = grid[-1, 0]
    last.set_xlim(max(min(lows), traces[0].histogram.low) - 0.2, max(highs) + 0.4)
    last.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"$10^{{{x:.0f}}}$"))
    last.xaxis.set_major_locator(MaxNLocator(integer=True))
    last.set_xlabel(f"singular value of the state, layer {layer}, head {number}")
    return figure


@styled
def ordered_spectra(traces: Sequence[TraceRecord], head: str | None = None) -> Figure:
    """The same singular values by their rank: the geometric mean over tokens."""
    traces, layer, number = having_head(traces, head)
    figure, axes = new_figure(7, 3.6)
    for trace, shade in zip(traces, colours_of(traces), strict=True):
        values = [10**x for x in trace.spectrum[trace.layers.index(layer)][number]]
        axes.plot(range(1, len(values) + 1), values, color=shade, linewidth=2, label=literal(label_of(trace)))
    axes.set_yscale("log")
    axes.set(
        xlabel=f"rank of the singular value, layer {layer}, head {number}",
        ylabel="singular value",
        title="Spectrum of the state",
    )
    axes.legend()
    return figure


@styled
def utilisation_maps(traces: Sequence[TraceRecord]) -> Figure:
    """Rank utilisation by layer and head, one map for each model on one scale of colours."""
    high = max(value for trace in traces for row in trace.utilisation_by_head for value in row)
    rows, heads = max(len(trace.layers) for trace in traces), max(trace.heads for trace in traces)
    width = 1.6 + len(traces) * max(1.6, 0.32 * heads)
    figure, grid = new_figure(width, 1.1 + 0.28 * rows, 1, len(traces), squeeze=False)
    for axes, trace in zip(grid[0], traces, strict=True):
        image = axes.imshow(trace.utilisation_by_head, aspect="auto", cmap="viridis", vmin=0, vmax=high)
        axes.grid(visible=False)
        axes.set_title(literal(trace.name), fontsize=10, fontweight="normal")
        axes.set_xlabel("head")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_yticks(range(len(trace.layers)), [str(layer) for layer in trace.layers])
    grid[0][0].set_ylabel("layer")
    figure.colorbar(image, ax=list(grid[0]), label="rank utilisation", shrink=0.9)
    return figure


@styled
def filter_maps(record: FiltersRecord) -> Figure:
    """Convolution filters of queries, keys and values: a column for each channel, lines between heads."""
    layers = list(record.filters)
    roles = list(record.filters[layers[0]])
    figure, grid = new_figure(8, 0.9 + 0.95 * len(layers), len(layers), len(roles), squeeze=False)
    for row, layer in zip(grid, layers, strict=True):
        for axes, role in zip(row, roles, strict=True):
            filter_map(axes, record.filters[layer][role])
            if layer == layers[0]:
                axes.set_title(literal(role), fontsize=10, fontweight="normal")
            if layer == layers[-1]:
                axes.set_xlabel("channel, head by head")
            else:
                axes.set_xticklabels([])
            if role == roles[0]:
                axes.set_ylabel(f"layer {literal(layer)}\ntaps")
    return figure


def filter_map(axes: Axes, by_head: Sequence[Sequence[Sequence[float]]]) -> None:
    """The filters [heads, channels, taps] of one role in one layer."""
    taps = [[float(filters[tap]) for head in by_head for filters in head] for tap in range(len(by_head[0][0]))]
    bound = sorted(abs(value) for tap in taps for value in tap)[int(0.99 * len(taps) * len(taps[0]))] or 1.0
    axes.imshow(taps, aspect="auto", cmap="RdBu_r", vmin=-bound, vmax=bound, interpolation="nearest")
    axes.grid(visible=False)
    axes.set_yticks([])
    for head in range(1, len(by_head)):
        axes.axvline(head * len(by_head[0]) - 0.5, color=INK, linewidth=0.8)


@styled
def retrieval(traces: Sequence[TraceRecord]) -> Figure:
    """Measured amplification of query noise in sampled states, between the two bounds of the theorem.

    Of many states an even share is drawn, unless one is outside its bounds: then all are.
    """
    figure, grid = new_figure(7, 1 + 2.4 * len(traces), len(traces), squeeze=False, sharey=True)
    for axes, trace, shade in zip(grid[:, 0], traces, colours_of(traces), strict=True):
        amplifications(axes, trace.bounds, shade)
        violations = trace.bounds.violations
        verdict = "none outside its bounds" if not violations else f"{violations} OUTSIDE their bounds"
        title = f"{literal(label_of(trace))}: {trace.bounds.states} states, {verdict}"
        axes.set_title(title, fontsize=10, fontweight="normal")
    grid[-1][0].set_xlabel("states, by effective rank")
    grid[0][0].legend(loc="upper left")
    return figure


def amplifications(axes: Axes, bounds: Bounds, shade: str) -> None:
    """The states of one model in the order of their effective rank."""
    order = sorted(range(bounds.states), key=lambda i: bounds.effective_rank[i])
    if not bounds.violations:
        order = order[:: max(1, -(-len(order) // STATES_DRAWN))]
    x = range(len(order))
    lower, upper, found = (
        [_finite(values[i]) for i in order]
        for values in (bounds.amplification_lower, bounds.amplification_upper, bounds.amplification)
    )
    bars = [(i, end) for i in x for end in (lower[i], upper[i], math.nan)]  # one path, with a gap after each bar
    axes.plot(
        *zip(*bars, strict=True), color=MUTED, alpha=0.35, linewidth=1.4, label="between the bounds of the theorem"
    )
    axes.plot(x, found, ".", color=shade, markersize=4, label="measured")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("error out / error in")


def _finite(value: float | None) -> float:
    return math.nan if value is None else max(value, 1e-12)


def draw_analysis(
    traces: Sequence[TraceRecord], filters: Sequence[FiltersRecord], folder: Path, head: str | None = None
) -> list[Path]:
    """All figures of an analysis, as files."""
    figures = {
        "utilisation": utilisation_curves(traces),
        "spectra": spectra(traces, head),
        "spectrum": ordered_spectra(traces, head),
        "utilisation-by-head": utilisation_maps(traces),
        "retrieval-error": retrieval(traces),
        **{f"filters-{record.name}": filter_maps(record) for record in filters},
    }
    return [path for name, figure in figures.items() for path in save(figure, folder / name)]
