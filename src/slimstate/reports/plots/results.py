"""Figures of results: perplexity against state size, recall, errors of layers, training losses."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from slimstate.records.evaluation import UNCUT, Result, Row, SweepRecord, Uncut
from slimstate.records.training import ReconstructionRecord, TrainingRunRecord
from slimstate.reports.plots import style
from slimstate.reports.plots.style import INK, MUTED, new_figure, save, series, styled
from slimstate.reports.tables import Metric, perplexity_metric, write_tables

DASHES = {"kq": "-", "k": "--", "q": ":"}  # by score


def draw_sweep(sweep: SweepRecord, folder: Path) -> None:
    write_tables(sweep, folder)
    save(pareto(sweep), folder / "pareto")


@styled
def pareto(sweep: SweepRecord) -> Figure:
    """Draw perplexity, where it is known, against the size of the state; a circle marks the recommended row."""
    figure, axes = new_figure(7, 4.2)
    metric = perplexity_metric(sweep)
    star = _point(sweep.uncut, metric)
    for number, (name, places) in enumerate(sorted(_groups(sweep.rows).items())):
        first = sweep.rows[places[0]]
        shade = style.colour(number, first.method)
        points = [_point(sweep.rows[place], metric) for place in places]
        x, y = zip(*points, star, strict=True)
        axes.plot(x, y, DASHES.get(first.score, "-"), color=shade, linewidth=1.8, label=style.literal(name))
        for place, point in zip(places, points, strict=True):
            axes.plot(*point, "o", color=shade, markersize=7, gid=f"point-{place}")
    stored = "fp32"
    if sweep.state_dtypes != ("float32",):
        stored = "as stored"
        front = sorted([star, *(_point(sweep.rows[place], metric) for place in sweep.front)])
        axes.plot(*zip(*front, strict=True), "-", color=MUTED, linewidth=5, alpha=0.35, zorder=0, label="front")
    axes.plot(*star, "*", color=INK, markersize=13, gid="point-uncut")
    best = sweep.recommended
    if best is not None and best.row is not None:
        label = "recommended" if best.within else "smallest loss"
        ring = {"markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 1.6}
        axes.plot(*_point(sweep.rows[best.row], metric), "o", markersize=15, label=label, **ring)
    axes.set(yscale="log", ylabel=metric.long_title, title="What a smaller state costs", xlim=(0, None))
    axes.set_xlabel(f"state per sequence, MiB ({stored})")
    style.plain_log_ticks(axes)
    style.place_legend(figure, axes)
    return figure


def _point(result: Row | Uncut, metric: Metric) -> tuple[float, float]:
    value = metric.value(result)
    return result.state_bytes / 2**20, math.nan if value is None else value


def _groups(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Group the places of rows by method, and by score and state type where there are several; narrowest first."""
    has_scores, has_types = len({row.score for row in rows}) > 1, {row.state_dtype for row in rows} != {"float32"}
    groups: dict[str, list[int]] = {}
    for place, row in sorted(enumerate(rows), key=lambda entry: entry[1].key_dim):
        name = f"{row.method} ({row.score})" if has_scores and row.method != UNCUT else row.method
        groups.setdefault(f"{name}, {row.state_dtype}" if has_types else name, []).append(place)
    return groups


@styled
def recall_curves(results: Sequence[Result]) -> Figure:
    """Draw the accuracy of associative recall against the number of pairs, for results that have it."""
    figure, axes = new_figure(7, 3.6)
    for number, (result, shade, label) in enumerate(series(results)):
        points = [(point.pairs, point.accuracy) for point in result.recall_points]
        axes.plot(*zip(*points, strict=True), color=shade, linewidth=2, label=label)
        for place, point in enumerate(points):
            axes.plot(*point, "o", color=shade, markersize=6, gid=f"recall-{number}-{place}")
    if (first := results[0].associative_recall) is not None:
        axes.axhline(1 / first.candidates, color=MUTED, linewidth=1, linestyle="--", label="chance")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set(xlabel="key-value pairs in the text", ylabel="share of names recalled", title="Associative recall")
    axes.set_ylim(0, 1)
    axes.legend()
    return figure


@styled
def layer_errors(records: Sequence[ReconstructionRecord]) -> Figure:
    """Draw the error of every layer on held-out windows: a ring after the cut, a dot after the reconstruction."""
    figure, axes = new_figure(7, 3.6)
    for record, shade, label in series(records):
        layers = [layer.layer for layer in record.layers]
        before, after = zip(*((layer.held_out_before, layer.held_out_after) for layer in record.layers), strict=True)
        axes.vlines(layers, after, before, color=shade, linewidth=1.2, alpha=0.5)
        axes.plot(layers, before, "o", color=shade, markerfacecolor="none", markersize=5, clip_on=False)
        axes.plot(layers, after, "o", color=shade, markersize=5, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer", ylabel="relative squared error", title="Reconstruction", ylim=(0, None))
    figure.legend(loc="outside lower left")
    return figure


@styled
def loss_curves(records: Sequence[TrainingRunRecord], title: str) -> Figure:
    """Draw training losses against tokens, each point a mean over a twentieth of the training."""
    figure, axes = new_figure(7, 3.6)
    for record, shade, label in series(records):
        tokens_per_step = record.settings.length * record.settings.batch_size
        log, span = record.log, max(1, len(record.log) // 20)
        ends = range(span, len(log) + 1)
        means = [sum(entry.loss for entry in log[end - span : end]) / span for end in ends]
        tokens = [log[end - 1].step * tokens_per_step for end in ends]
        axes.plot(tokens, means, color=shade, linewidth=1.5, label=label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k"))
    axes.set(xlabel="tokens trained on", ylabel="training loss, nats per token", title=title)
    figure.legend(loc="outside lower left")
    return figure
