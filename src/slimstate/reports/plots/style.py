"""The style of all figures, and how they are written: as PNG and PDF, or as SVG in the colours of a page."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from slimstate.records.numbers import dims_text
from slimstate.records.parts import Model
from slimstate.system.atomic import staged_file, writing

M = TypeVar("M", bound=Model)
INK, GRID, PAPER, MUTED = "#1d2430", "#dfe3e8", "#fefefe", "#6b7480"
COORDINATES = re.compile(r' (?:d|x|y)="[^"]*"|(?:rotate|translate)\([^)]*\)')  # in SVG; text keeps all its digits
THEME = {INK: "ink", GRID: "grid", PAPER: "paper", MUTED: "muted"}  # the page's variables for them
PALETTE = ("#3b6fd4", "#d9612b", "#2a9d6e", "#a24fb5", "#c9a013", "#2aa5b8", "#c4476b", "#7a6a53")
METHODS = {"drrqr": "#3b6fd4", "grad": "#d9612b", "s-wanda": "#2a9d6e", "l1": "#a24fb5", "random": "#8a93a0"}
MAX_LEGEND_LINES = 7  # inside the axes
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER),
    "svg.fonttype": "none",
    "svg.hashsalt": "slimstate",
    "pdf.fonttype": 42,
}
styled = mpl.rc_context(STYLE)  # a decorator, which leaves the caller's settings of matplotlib alone


def colour(number: int, method: str | None = None) -> str:
    """Return the colour of a method, or of the palette for a method without its own."""
    return METHODS.get(method or "", PALETTE[number % len(PALETTE)])


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Return a figure of this size in inches, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


@styled
def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and PDF, and return both paths."""
    paths = []
    with writing(path):
        for suffix in (".png", ".pdf"):
            metadata = {"CreationDate": None} if suffix == ".pdf" else None
            target = path.with_name(path.name + suffix)  # a model's name may hold dots
            with staged_file(target) as partial:
                figure.savefig(partial, format=suffix[1:], dpi=170, metadata=metadata)
            paths.append(target)
    return paths


@styled
def svg(figure: Figure, prefix: str) -> str:
    """Return a figure as SVG for a page: ids begin with `prefix`, neutral colours are variables of the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, dpi=200, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r">\s+<", "><", text).replace(" \n", " ")
    for size in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for shade, variable in THEME.items():
        text = text.replace(shade, f"var(--{variable})")
    return COORDINATES.sub(lambda match: re.sub(r"(\d+\.\d{2})\d+", r"\1", match[0]), text)


def label_of(model: Model) -> str:
    """Return the name of a model with its cut, and whether it was reconstructed, distilled or recovered."""
    if (cut := model.cut) is None:
        return f"{model.name} (uncut)"
    trainings = ["distilled" if entry.get("distilled") else "recovered" for entry in cut.recovered]
    later = "".join(f", {name}" for name in dict.fromkeys(["reconstructed"] * bool(cut.reconstructed) + trainings))
    method = cut.value_method if cut.value_dim and cut.key_dim == cut.width else cut.method
    dims = f"{dims_text(cut.key_dim, cut.value_dim)} of {dims_text(cut.width, cut.value_dim and cut.value_width)}"
    return f"{model.name} ({method}, {dims}{later})"


def literal(text: str) -> str:
    """Escape what matplotlib would read as a formula."""
    return text.replace("$", r"\$")


def series(models: Sequence[M]) -> list[tuple[M, str, str]]:
    """Return each model with a colour and its label: ink for uncut models, else that of the method where it is free."""
    shades: list[str] = []
    for number, model in enumerate(models):
        shade = INK if model.cut is None else colour(number, model.cut.method)
        if shade in shades:
            shade = next((other for other in PALETTE if other not in shades), PALETTE[number % len(PALETTE)])
        shades.append(shade)
    return [(model, shade, literal(label_of(model))) for model, shade in zip(models, shades, strict=True)]


def place_legend(figure: Figure, axes: Axes) -> None:
    """Put a legend into the axes, or below them where it is long and would cover the data."""
    count = len(axes.get_legend_handles_labels()[1])
    if count <= MAX_LEGEND_LINES:
        axes.legend()
    else:
        figure.set_figheight(figure.get_figheight() + 0.11 * count)
        figure.legend(loc="outside lower left", ncols=2, fontsize=9)


def plain_log_ticks(axes: Axes) -> None:
    """Label a logarithmic y axis at 1, 2 and 5, without exponents."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
