"""Figures of states: how they are used over time and by head, their spectra, and the filters in front of them."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from slimstate.records.numbers import plural
from slimstate.records.states import Bounds, FiltersRecord, TraceRecord
from slimstate.reports.plots.style import INK, MUTED, literal, new_figure, save, series, styled
from slimstate.system.errors import PlanError

MAX_STATES = 400  # of one model, evenly spaced: more cannot be told apart


@styled
def utilisation_curves(traces: Sequence[TraceRecord]) -> Figure:
    """Draw rank utilisation against the token index, the mean over layers and heads, of all models."""
    figure, axes = new_figure(7, 3.8)
    for trace, shade, label in series(traces):
        axes.plot(trace.times, trace.curve, color=shade, linewidth=2, label=label)
    axes.set(xlabel="token index", ylabel="rank utilisation u(S)", title="State utilisation", xlim=(0, None))
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def find_head(layers: Sequence[int], heads: int, head: str) -> tuple[int, int]:
    """Return the layer and the head that LAYER:HEAD names, in a model with these layers and this number of heads."""
    layer, _, number = head.partition(":")
    if not (layer.isdecimal() and number.isdecimal()):
        raise PlanError(f"`head` {head} is not a head: give LAYER:HEAD, for example {layers[0]}:0")
    if int(layer) not in layers or int(number) >= heads:
        linear = ", ".join(map(str, layers))
        raise PlanError(f"`head` {head} is not in the model: linear layers are {linear}, heads 0 to {heads - 1}")
    return int(layer), int(number)


def _with_head(traces: Sequence[TraceRecord], head: str | None) -> tuple[list[TraceRecord], int, int]:
    """Return the traces that have a layer and head, by default those with median utilisation in the first, and both."""
    first = traces[0]
    if head is None:
        rows = zip(first.layers, first.utilisation_by_head, strict=True)
        by_head = sorted((value, layer, number) for layer, row in rows for number, value in enumerate(row))
        _, layer, number = by_head[len(by_head) // 2]
    else:
        layer, number = find_head(first.layers, first.heads, head)
    return [trace for trace in traces if layer in trace.layers and number < trace.heads], layer, number


@styled
def spectra(traces: Sequence[TraceRecord], head: str | None = None) -> Figure:
    """Draw histograms of the singular values of one head's states, a panel for each model that has this head."""
    traces, layer, number = _with_head(traces, head)
    figure, grid = new_figure(7, 1.1 + 1.35 * len(traces), len(traces), sharex=True, squeeze=False)
    ends: list[float] = []
    for axes, (trace, shade, label) in zip(grid[:, 0], series(traces), strict=True):
        histogram = trace.histogram
        counts = histogram.counts[trace.layers.index(layer)][number]
        step = (histogram.high - histogram.low) / len(counts)
        left = [histogram.low + step * i for i in range(len(counts))]
        filled = [x for x, count in zip(left, counts, strict=True) if count]
        ends += [min(filled), max(filled)]
        heights = [count / sum(counts) / step for count in counts]
        axes.bar(left, heights, width=step, align="edge", color=shade, linewidth=0)
        axes.set_ylabel("density")
        axes.set_title(label, fontsize=10, fontweight="normal")
        axes.yaxis.set_major_locator(MaxNLocator(3))
    last = grid[-1, 0]
    last.set_xlim(max(min(ends), traces[0].histogram.low) - 0.2, max(ends) + 0.4)
    last.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"$10^{{{x:.0f}}}$"))
    last.xaxis.set_major_locator(MaxNLocator(integer=True))
    last.set_xlabel(f"singular value of the state, layer {layer}, head {number}")
    return figure


@styled
def ordered_spectra(traces: Sequence[TraceRecord], head: str | None = None) -> Figure:
    """Draw the singular values of one head's states by rank, the geometric mean over tokens."""
    traces, layer, number = _with_head(traces, head)
    figure, axes = new_figure(7, 3.6)
    for trace, shade, label in series(traces):
        values = [10**x for x in trace.spectrum[trace.layers.index(layer)][number]]
        axes.plot(range(1, len(values) + 1), values, color=shade, linewidth=2, label=label)
    axes.set(yscale="log", ylabel="singular value", title="Spectrum of the state")
    axes.set_xlabel(f"rank of the singular value, layer {layer}, head {number}")
    axes.legend()
    return figure


@styled
def utilisation_maps(traces: Sequence[TraceRecord]) -> Figure:
    """Draw rank utilisation by layer and head, a map for each model with the same colours."""
    high = max(value for trace in traces for row in trace.utilisation_by_head for value in row)
    rows, heads = max(len(trace.layers) for trace in traces), max(trace.heads for trace in traces)
    width = 1.6 + len(traces) * max(1.6, 0.32 * heads)
    figure, grid = new_figure(width, 1.1 + 0.28 * rows, 1, len(traces), squeeze=False)
    for axes, trace in zip(grid[0], traces, strict=True):
        image = axes.imshow(trace.utilisation_by_head, aspect="auto", cmap="viridis", vmin=0, vmax=high)
        axes.grid(visible=False)
        axes.set_title(literal(trace.name), fontsize=10, fontweight="normal")
        axes.set(xlabel="head", ylabel="layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_yticks(range(len(trace.layers)), [str(layer) for layer in trace.layers])
    figure.colorbar(image, ax=list(grid[0]), label="rank utilisation", shrink=0.9)
    return figure


@styled
def filter_maps(record: FiltersRecord) -> Figure:
    """Draw the convolution filters of queries, keys and values: a column for each channel, lines between heads."""
    layers = list(record.filters)
    roles = list(record.filters[layers[0]])
    figure, grid = new_figure(8, 0.9 + 0.95 * len(layers), len(layers), len(roles), squeeze=False)
    for row, layer in zip(grid, layers, strict=True):
        for axes, role in zip(row, roles, strict=True):
            _draw_filters(axes, record.filters[layer][role])
            axes.set(xlabel="channel, head by head", ylabel=f"layer {literal(layer)}\ntaps")
            axes.label_outer()
            if layer == layers[0]:
                axes.set_title(literal(role), fontsize=10, fontweight="normal")
    return figure


def _draw_filters(axes: Axes, by_head: Sequence[Sequence[Sequence[float]]]) -> None:
    """Draw the filters [heads, channels, taps] of one role in one layer."""
    taps = [[float(filters[tap]) for head in by_head for filters in head] for tap in range(len(by_head[0][0]))]
    bound = sorted(abs(value) for tap in taps for value in tap)[int(0.99 * len(taps) * len(taps[0]))] or 1.0
    axes.imshow(taps, aspect="auto", cmap="RdBu_r", vmin=-bound, vmax=bound, interpolation="nearest")
    axes.grid(visible=False)
    axes.set_yticks([])
    for head in range(1, len(by_head)):
        axes.axvline(head * len(by_head[0]) - 0.5, color=INK, linewidth=0.8)


@styled
def retrieval(traces: Sequence[TraceRecord]) -> Figure:
    """Draw the amplification of query noise in sampled states between the bounds of the theorem."""
    figure, grid = new_figure(7, 1 + 2.4 * len(traces), len(traces), squeeze=False, sharey=True)
    for axes, (trace, shade, label) in zip(grid[:, 0], series(traces), strict=True):
        _draw_states(axes, trace.bounds, shade)
        outside = f"{trace.bounds.violations or 'none'} outside the bounds"
        title = f"{label}: {plural(trace.bounds.states, 'state')}, {outside}"
        axes.set_title(title, fontsize=10, fontweight="normal")
    grid[-1][0].set_xlabel("states, by effective rank")
    grid[0][0].legend(loc="upper left")
    return figure


def _draw_states(axes: Axes, bounds: Bounds, shade: str) -> None:
    """Draw the states of one model by effective rank: evenly thinned, or all if one is outside its bounds."""
    order = sorted(range(bounds.states), key=lambda i: bounds.effective_rank[i])
    if not bounds.violations:
        order = order[:: max(1, -(-len(order) // MAX_STATES))]
    x = range(len(order))
    lower, upper, measured = (
        [math.nan if (value := values[i]) is None else max(value, 1e-12) for i in order]
        for values in (bounds.amplification_lower, bounds.amplification_upper, bounds.amplification)
    )
    bars = [(i, end) for i in x for end in (lower[i], upper[i], math.nan)]  # one path, with a gap after each bar
    axes.plot(*zip(*bars, strict=True), color=MUTED, alpha=0.35, linewidth=1.4, label="range between the bounds")
    axes.plot(x, measured, ".", color=shade, markersize=4, label="measured")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("error out / error in")


def draw_analysis(
    traces: Sequence[TraceRecord], filters: Sequence[FiltersRecord], folder: Path, head: str | None = None
) -> list[Path]:
    """Write all figures of an analysis, and return their paths."""
    figures = {
        "utilisation": utilisation_curves(traces),
        "spectra": spectra(traces, head),
        "spectrum": ordered_spectra(traces, head),
        "utilisation-by-head": utilisation_maps(traces),
        "retrieval-error": retrieval(traces),
        **{f"filters-{record.name}": filter_maps(record) for record in filters},
    }
    return [path for name, figure in figures.items() for path in save(figure, folder / name)]
