"""Figures from records, by matplotlib. Nothing here loads a model: records are all it sees.

Each function takes records and gives a figure; `save` writes it for papers and slides, `svg` for a page, where the
colours of ink, grid and paper follow the reader's theme and every element with an id can be pointed at.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.records.sweep import SweepRecord
from slimstate.system.atomic import staged_file
from slimstate.system.errors import OutputError, PlanError, SlimstateError

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
except ImportError as error:  # pragma: no cover
    raise SlimstateError("figures need matplotlib: pip install 'slimstate[report]'") from error

Record = Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")
INK, GRID, PAPER, MUTED = "#1d2430", "#dfe3e8", "#fefefe", "#6b7480"
COORDINATES = re.compile(r' (?:d|x|y)="[^"]*"|(?:rotate|translate)\([^)]*\)')  # of SVG; text keeps all its digits
STATES_DRAWN = 400  # of one model, spread evenly: more of them no eye can tell apart
THEME = {INK: "var(--ink)", GRID: "var(--grid)", PAPER: "var(--paper)", MUTED: "var(--muted)"}
PALETTE = ("#3b6fd4", "#d9612b", "#2a9d6e", "#a24fb5", "#c9a013", "#2aa5b8", "#c4476b", "#7a6a53")
METHODS = {
    "drrqr": "#3b6fd4", "grad": "#d9612b", "s-wanda": "#2a9d6e", "l1": "#a24fb5", "random": "#8a93a0",
}  # fmt: skip
DASHES = {"kq": "-", "k": "--", "q": ":"}  # by what channels are judged
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "slimstate",
    "pdf.fonttype": 42,
}


def colour(number: int, method: str | None = None) -> str:
    return METHODS.get(method or "", PALETTE[number % len(PALETTE)])


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Drawn in the house style, which leaves the caller's settings of matplotlib alone."""

    @functools.wraps(draw)
    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return within


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


@styled
def save(figure: Figure, path: Path) -> list[Path]:
    """As PNG and PDF."""
    written = []
    try:
        for suffix in (".png", ".pdf"):
            metadata = {"CreationDate": None} if suffix == ".pdf" else None
            target = path.with_name(path.name + suffix)  # a model's name may hold dots
            with staged_file(target) as partial:
                figure.savefig(partial, format=suffix[1:], dpi=170, metadata=metadata)
            written.append(target)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    return written


@styled
def svg(figure: Figure, prefix: str) -> str:
    """As SVG to stand in a page: its ids begin with `prefix`, its neutral colours are the page's variables."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, dpi=200, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for colour_code, variable in THEME.items():
        text = text.replace(colour_code, variable)
    return COORDINATES.sub(lambda found: re.sub(r"(\d+\.\d{2})\d+", r"\1", found[0]), text)


def label_of(record: TraceRecord | Record) -> str:
    """A model by its name and what was done to it."""
    record = record.to_json() if isinstance(record, TraceRecord) else record
    cut = record.get("cut")
    return (
        f"{record['name']} ({cut['method']}, {cut['key_dim']} of {cut['width']})"
        if cut
        else f"{record['name']} (uncut)"
    )


def literal(text: str) -> str:
    """As matplotlib draws it as it is, though it may hold what starts a formula."""
    return text.replace("$", r"\$")


def colours_of(records: Sequence[Record]) -> list[str]:
    """One colour per model; models that were not cut are drawn in ink, methods keep theirs while they are single."""
    taken: list[str] = []
    for number, record in enumerate(records):
        cut = record.get("cut")
        wanted = INK if not cut else colour(number, cut["method"])
        if wanted in taken:
            wanted = next((shade for shade in PALETTE if shade not in taken), PALETTE[number % len(PALETTE)])
        taken.append(wanted)
    return taken


@styled
def utilisation_curves(traces: Sequence[Any]) -> Figure:
    """Rank utilisation against the token index, averaged over layers and heads, all models in one figure."""
    traces = [trace.to_json() if isinstance(trace, TraceRecord) else trace for trace in traces]
    figure, axes = new_figure(7, 3.8)
    for trace, shade in zip(traces, colours_of(traces), strict=True):
        axes.plot(trace["times"], trace["curve"], color=shade, linewidth=2, label=literal(label_of(trace)))
    axes.set(xlabel="token index", ylabel="rank utilisation u(S)", title="How much of the state is used")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend()
    return figure


def median_head(trace: Record) -> tuple[int, int]:
    """The layer and the head whose utilisation is the median one."""
    rows = zip(trace["layers"], trace["utilisation_by_head"], strict=True)
    by_head = [(value, layer, head) for layer, row in rows for head, value in enumerate(row)]
    _, layer, head = sorted(by_head)[len(by_head) // 2]
    return layer, head


def find_head(layers: Sequence[int], heads: int, head: str) -> tuple[int, int]:
    """The layer and the head that LAYER:HEAD names."""
    layer, _, number = head.partition(":")
    if not (layer.isdecimal() and number.isdecimal()):
        raise PlanError(f"`head` {head}: give LAYER:HEAD, for example {layers[0]}:0")
    if int(layer) not in layers or int(number) >= heads:
        known = ", ".join(map(str, layers))
        raise PlanError(f"`head` {head}: linear layers are {known}, heads 0 to {heads - 1}")
    return int(layer), int(number)


def having_head(traces: Sequence[Record], head: str | None) -> tuple[list[Record], int, int]:
    """The traces that have this layer and head, a typical one of the first by default, and their numbers."""
    first = traces[0]
    layer, number = median_head(first) if head is None else find_head(first["layers"], first["heads"], head)
    return [trace for trace in traces if layer in trace["layers"] and number < trace["heads"]], layer, number


@styled
def spectra(traces: Sequence[Record], head: str | None = None) -> Figure:
    """The singular values of one head's states over all tokens but the first, as histograms one above the other.

    Models that have no such head are left out.
    """
    traces, layer, number = having_head(traces, head)
    figure, grid = new_figure(7, 1.1 + 1.35 * len(traces), len(traces), sharex=True, squeeze=False)
    lows, highs = [], []
    for axes, trace, shade in zip(grid[:, 0], traces, colours_of(traces), strict=True):
        histogram = trace["histogram"]
        counts = histogram["counts"][trace["layers"].index(layer)][number]
        step = (histogram["high"] - histogram["low"]) / len(counts)
        left = [histogram["low"] + step * i for i in range(len(counts))]
        total = sum(counts)
        filled = [x for x, count in zip(left, counts, strict=True) if count]
        lows.append(min(filled))
        highs.append(max(filled))
        axes.bar(left, [count / total / step for count in counts], width=step, align="edge", color=shade, linewidth=0)
        axes.set_ylabel("density")
        axes.set_title(literal(label_of(trace)), fontsize=10, fontweight="normal")
        axes.yaxis.set_major_locator(MaxNLocator(3))
    last = grid[-1, 0]
    last.set_xlim(max(min(lows), traces[0]["histogram"]["low"]) - 0.2, max(highs) + 0.4)
    last.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"$10^{{{x:.0f}}}$"))
    last.xaxis.set_major_locator(MaxNLocator(integer=True))
    last.set_xlabel(f"singular value of the state, layer {layer}, head {number}")
    return figure


@styled
def ordered_spectra(traces: Sequence[Record], head: str | None = None) -> Figure:
    """The same singular values by their rank: the geometric mean over tokens."""
    traces, layer, number = having_head(traces, head)
    figure, axes = new_figure(7, 3.6)
    for trace, shade in zip(traces, colours_of(traces), strict=True):
        values = [10**x for x in trace["spectrum"][trace["layers"].index(layer)][number]]
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
def utilisation_maps(traces: Sequence[Record]) -> Figure:
    """Rank utilisation by layer and head, one map for each model on one scale of colours."""
    high = max(value for trace in traces for row in trace["utilisation_by_head"] for value in row)
    rows, heads = max(len(trace["layers"]) for trace in traces), max(trace["heads"] for trace in traces)
    width = 1.6 + len(traces) * max(1.6, 0.32 * heads)
    figure, grid = new_figure(width, 1.1 + 0.28 * rows, 1, len(traces), squeeze=False)
    for axes, trace in zip(grid[0], traces, strict=True):
        image = axes.imshow(trace["utilisation_by_head"], aspect="auto", cmap="viridis", vmin=0, vmax=high)
        axes.grid(visible=False)
        axes.set_title(literal(trace["name"]), fontsize=10, fontweight="normal")
        axes.set_xlabel("head")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_yticks(range(len(trace["layers"])), [str(layer) for layer in trace["layers"]])
    grid[0][0].set_ylabel("layer")
    figure.colorbar(image, ax=list(grid[0]), label="rank utilisation", shrink=0.9)
    return figure


@styled
def filter_maps(record: Record) -> Figure:
    """Convolution filters of queries, keys and values: a column for each channel, lines between heads."""
    layers = list(record["filters"])
    roles = list(record["filters"][layers[0]])
    figure, grid = new_figure(8, 0.9 + 0.95 * len(layers), len(layers), len(roles), squeeze=False)
    for row, layer in zip(grid, layers, strict=True):
        for axes, role in zip(row, roles, strict=True):
            by_head = record["filters"][layer][role]
            taps = [[filters[tap] for head in by_head for filters in head] for tap in range(len(by_head[0][0]))]
            bound = sorted(abs(value) for tap in taps for value in tap)[int(0.99 * len(taps) * len(taps[0]))] or 1.0
            axes.imshow(taps, aspect="auto", cmap="RdBu_r", vmin=-bound, vmax=bound, interpolation="nearest")
            axes.grid(visible=False)
            axes.set_yticks([])
            for head in range(1, len(by_head)):
                axes.axvline(head * len(by_head[0]) - 0.5, color=INK, linewidth=0.8)
            if layer == layers[0]:
                axes.set_title(literal(role), fontsize=10, fontweight="normal")
            if layer == layers[-1]:
                axes.set_xlabel("channel, head by head")
            else:
                axes.set_xticklabels([])
            if role == roles[0]:
                axes.set_ylabel(f"layer {literal(layer)}\ntaps")
    return figure


@styled
def retrieval(traces: Sequence[Record]) -> Figure:
    """Measured amplification of query noise in sampled states, between the two bounds of the theorem.

    Of many states an even share is drawn, unless one is outside its bounds: then all are.
    """
    figure, grid = new_figure(7, 1 + 2.4 * len(traces), len(traces), squeeze=False, sharey=True)
    for axes, trace, shade in zip(grid[:, 0], traces, colours_of(traces), strict=True):
        bounds, violations = trace["bounds"], trace["bounds"]["violations"]
        order = sorted(range(bounds["states"]), key=lambda i: bounds["effective_rank"][i])
        if not violations:
            order = order[:: max(1, -(-len(order) // STATES_DRAWN))]
        x = range(len(order))
        lower, upper, found = (
            [_finite(bounds[name][i]) for i in order]
            for name in ("amplification_lower", "amplification_upper", "amplification")
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
        verdict = "none outside its bounds" if not violations else f"{violations} OUTSIDE their bounds"
        title = f"{literal(label_of(trace))}: {bounds['states']} states, {verdict}"
        axes.set_title(title, fontsize=10, fontweight="normal")
    grid[-1][0].set_xlabel("states, by effective rank")
    grid[0][0].legend(loc="upper left")
    return figure


def _finite(value: float | None) -> float:
    return math.nan if value is None else max(value, 1e-12)


@styled
def pareto(sweep: SweepRecord | Record) -> Figure:
    """Perplexity against the bytes of state, a line for each method and score."""
    sweep = sweep.to_json() if isinstance(sweep, SweepRecord) else sweep
    figure, axes = new_figure(7, 4.2)
    uncut, rows = sweep["uncut"], sweep["rows"]
    for number, (name, unordered) in enumerate(sorted(_series(rows).items())):
        members = sorted(unordered, key=lambda row: row["key_dim"])
        shade = colour(number, members[0]["method"])
        points = [*((row["state_bytes"] / 2**20, row["perplexity"]) for row in members)]
        x, y = zip(*points, (uncut["state_bytes"] / 2**20, uncut["perplexity"]), strict=True)
        axes.plot(x, y, DASHES.get(members[0]["score"], "-"), color=shade, linewidth=1.8, label=literal(name))
        for row, point in zip(members, points, strict=True):
            axes.plot(*point, "o", color=shade, markersize=7, gid=f"point-{rows.index(row)}")
    axes.plot(uncut["state_bytes"] / 2**20, uncut["perplexity"], "*", color=INK, markersize=13, gid="point-uncut")
    chosen = sweep["recommended"]
    if chosen.get("row") is not None:
        row = rows[chosen["row"]]
        axes.plot(
            row["state_bytes"] / 2**20, row["perplexity"], "o", markersize=15, markerfacecolor="none",
            markeredgecolor=INK, markeredgewidth=1.6, label="recommended" if chosen.get("within") else "mildest cut",
        )  # fmt: skip
    axes.set_yscale("log")
    plain_log_ticks(axes)
    axes.set(xlabel="state per sequence, MiB (fp32)", ylabel="perplexity", title="What a smaller state costs")
    axes.set_xlim(left=0)
    axes.legend()
    return figure


def _series(rows: Iterable[Record]) -> dict[str, list[Record]]:
    """Rows by method, and by score where there are several."""
    rows = list(rows)
    several = len({row["score"] for row in rows}) > 1
    found: dict[str, list[Record]] = {}
    for row in rows:
        found.setdefault(f"{row['method']} ({row['score']})" if several else row["method"], []).append(row)
    return found


def plain_log_ticks(axes: Axes) -> None:
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


@styled
def recall_curves(evaluations: Sequence[Record]) -> Figure:
    """Accuracy of associative recall against the number of pairs to remember."""
    figure, axes = new_figure(7, 3.6)
    for number, (record, shade) in enumerate(zip(evaluations, colours_of(evaluations), strict=True)):
        points = record["associative_recall"]["points"]
        x, y = [point["pairs"] for point in points], [point["accuracy"] for point in points]
        axes.plot(x, y, color=shade, linewidth=2, label=literal(label_of(record)))
        for i, point in enumerate(zip(x, y, strict=True)):
            axes.plot(*point, "o", color=shade, markersize=6, gid=f"recall-{number}-{i}")
    chance = 1 / evaluations[0]["associative_recall"]["candidates"]
    axes.axhline(chance, color=MUTED, linewidth=1, linestyle="--", label="chance")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_ylim(0, 1)
    axes.set(xlabel="key-value pairs in the text", ylabel="recalled", title="Associative recall")
    axes.legend()
    return figure


@styled
def loss_curves(recoveries: Sequence[Record]) -> Figure:
    """The training loss of recoveries against the tokens seen, each point a mean over a twentieth of the training."""
    figure, axes = new_figure(7, 3.6)
    for record, shade in zip(recoveries, colours_of(recoveries), strict=True):
        per_step = record["settings"]["length"] * record["settings"]["batch_size"]
        log, span = record["log"], max(1, len(record["log"]) // 20)
        ends = range(span, len(log) + 1)
        means = [sum(entry["loss"] for entry in log[end - span : end]) / span for end in ends]
        x = [log[end - 1]["step"] * per_step for end in ends]
        axes.plot(x, means, color=shade, linewidth=1.5, label=literal(label_of(record)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k"))
    axes.set(xlabel="tokens trained on", ylabel="loss", title="Recovery")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def draw_analysis(
    trace_records: Sequence[TraceRecord], filters: Sequence[FiltersRecord], folder: Path, head: str | None = None
) -> list[Path]:
    """All figures of an analysis, as files."""
    traces = [record.to_json() for record in trace_records]
    figures = {
        "utilisation": utilisation_curves(traces),
        "spectra": spectra(traces, head),
        "spectrum": ordered_spectra(traces, head),
        "utilisation-by-head": utilisation_maps(traces),
        "retrieval-error": retrieval(traces),
        **{f"filters-{record.name}": filter_maps(record.to_json()) for record in filters},
    }
    return [path for name, figure in figures.items() for path in save(figure, folder / name)]
