"""Figures of what was measured: perplexity against the state, recall, the errors of layers, the loss of a recovery."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from slimstate.records.evaluation import Result
from slimstate.records.reconstruction import ReconstructionRecord
from slimstate.records.sweep import UNCUT, Row, SweepRecord, Uncut
from slimstate.records.training import RecoveryRecord
from slimstate.report.plots.style import (
    INK,
    MUTED,
    colour,
    colours_of,
    label_of,
    literal,
    new_figure,
    plain_log_ticks,
    styled,
)
from slimstate.report.tables import Metric, perplexity_metric

DASHES = {"kq": "-", "k": "--", "q": ":"}  # by what channels are judged


@styled
def pareto(sweep: SweepRecord) -> Figure:
    """Perplexity against the bytes of state, a line for each method and score. A row without a perplexity has no point.

    It is per word where all are known so, otherwise per token; the axis says which.

    The row that is recommended has a circle; an unfinished sweep recommends none.
    """
    figure, axes = new_figure(7, 4.2)
    metric = perplexity_metric(sweep)
    star = point_of(sweep.uncut, metric)
    for place, (name, members) in enumerate(sorted(_series(sweep.rows).items())):
        rows = [sweep.rows[number] for number in members]
        shade = colour(place, rows[0].method)
        points = [point_of(row, metric) for row in rows]
        x, y = zip(*points, star, strict=True)
        axes.plot(x, y, DASHES.get(rows[0].score, "-"), color=shade, linewidth=1.8, label=literal(name))
        for number, point in zip(members, points, strict=True):
            axes.plot(*point, "o", color=shade, markersize=7, gid=f"point-{number}")
    _draw_front(axes, sweep, metric)
    axes.plot(*star, "*", color=INK, markersize=13, gid="point-uncut")
    chosen = sweep.recommended
    if chosen is not None and chosen.row is not None:
        axes.plot(
            *point_of(sweep.rows[chosen.row], metric), "o", markersize=15, markerfacecolor="none", markeredgecolor=INK,
            markeredgewidth=1.6, label="recommended" if chosen.within else "mildest cut",
        )  # fmt: skip
    axes.set_yscale("log")
    plain_log_ticks(axes)
    kept = "fp32" if sweep.state_dtypes == ("float32",) else "as it is kept"
    axes.set(xlabel=f"state per sequence, MiB ({kept})", ylabel=metric.words, title="What a smaller state costs")
    axes.set_xlim(left=0)
    axes.legend()
    return figure


def mebibytes_of(measured: Row | Uncut) -> float:
    return measured.state_bytes / 2**20


def point_of(measured: Row | Uncut, metric: Metric) -> tuple[float, float]:
    value = metric.of(measured)
    return mebibytes_of(measured), math.nan if value is None else value


def _series(rows: Sequence[Row]) -> dict[str, list[int]]:
    """The places of rows by method, and by score and type of state where there are several; the narrowest first."""
    scores, types = len({row.score for row in rows}) > 1, {row.state_dtype for row in rows} != {"float32"}
    found: dict[str, list[int]] = {}
    for place, row in sorted(enumerate(rows), key=lambda entry: entry[1].key_dim):
        name = f"{row.method} ({row.score})" if scores and row.method != UNCUT else row.method
        found.setdefault(f"{name}, {row.state_dtype}" if types else name, []).append(place)
    return found


def _draw_front(axes: Axes, sweep: SweepRecord, metric: Metric) -> None:
    """A line through what nothing beats, where both key dims and types of the state were tried."""
    if sweep.state_dtypes != ("float32",):
        best: list[Row | Uncut] = [*(sweep.rows[place] for place in sweep.front), sweep.uncut]
        x, y = zip(*sorted(point_of(each, metric) for each in best), strict=True)
        axes.plot(x, y, "-", color=MUTED, linewidth=5, alpha=0.35, zorder=0, label="front")


@styled
def recall_curves(results: Sequence[Result]) -> Figure:
    """Accuracy of associative recall against the number of pairs to remember, of results that have it."""
    figure, axes = new_figure(7, 3.6)
    for number, (result, shade) in enumerate(zip(results, colours_of(results), strict=True)):
        points = result.recall_points
        x, y = [point.pairs for point in points], [point.accuracy for point in points]
        axes.plot(x, y, color=shade, linewidth=2, label=literal(label_of(result)))
        for i, point in enumerate(zip(x, y, strict=True)):
            axes.plot(*point, "o", color=shade, markersize=6, gid=f"recall-{number}-{i}")
    if (first := results[0].associative_recall) is not None:
        axes.axhline(1 / first.candidates, color=MUTED, linewidth=1, linestyle="--", label="chance")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_ylim(0, 1)
    axes.set(xlabel="key-value pairs in the text", ylabel="recalled", title="Associative recall")
    axes.legend()
    return figure


@styled
def layer_errors(reconstructions: Sequence[ReconstructionRecord]) -> Figure:
    """The error of every layer on windows that were held out: a ring for the cut, a dot for what it became."""
    figure, axes = new_figure(7, 3.6)
    for record, shade in zip(reconstructions, colours_of(reconstructions), strict=True):
        layers = [layer.layer for layer in record.layers]
        before = [layer.held_out_before for layer in record.layers]
        after = [layer.held_out_after for layer in record.layers]
        axes.vlines(layers, after, before, color=shade, linewidth=1.2, alpha=0.5)
        axes.plot(layers, before, "o", color=shade, markerfacecolor="none", markersize=5)
        axes.plot(layers, after, "o", color=shade, markersize=5, label=literal(label_of(record)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer", ylabel="relative squared error", title="Reconstruction", ylim=(0, None))
    figure.legend(loc="outside lower left")
    return figure


@styled
def loss_curves(recoveries: Sequence[RecoveryRecord]) -> Figure:
    """The training loss of recoveries against the tokens seen, each point a mean over a twentieth of the training."""
    figure, axes = new_figure(7, 3.6)
    for record, shade in zip(recoveries, colours_of(recoveries), strict=True):
        per_step = record.settings.length * record.settings.batch_size
        log, span = record.log, max(1, len(record.log) // 20)
        ends = range(span, len(log) + 1)
        means = [sum(entry.loss for entry in log[end - span : end]) / span for end in ends]
        x = [log[end - 1].step * per_step for end in ends]
        axes.plot(x, means, color=shade, linewidth=1.5, label=literal(label_of(record)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k"))
    axes.set(xlabel="tokens trained on", ylabel="loss", title="Recovery")
    figure.legend(loc="outside lower left")
    return figure
