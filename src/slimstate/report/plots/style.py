"""How all figures look, and how they are written.

`save` writes a figure for papers and slides, `svg` for a page, where the colours of ink, grid and paper follow the
reader's theme and every element with an id can be pointed at.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from slimstate.records.parts import Model
from slimstate.system.atomic import staged_file, writing

P = ParamSpec("P")
T = TypeVar("T")
INK, GRID, PAPER, MUTED = "#1d2430", "#dfe3e8", "#fefefe", "#6b7480"
COORDINATES = re.compile(r' (?:d|x|y)="[^"]*"|(?:rotate|translate)\([^)]*\)')  # of SVG; text keeps all its digits
THEME = {INK: "ink", GRID: "grid", PAPER: "paper", MUTED: "muted"}  # the page's variables for them
PALETTE = ("#3b6fd4", "#d9612b", "#2a9d6e", "#a24fb5", "#c9a013", "#2aa5b8", "#c4476b", "#7a6a53")
METHODS = {
    "drrqr": "#3b6fd4", "grad": "#d9612b", "s-wanda": "#2a9d6e", "l1": "#a24fb5", "random": "#8a93a0",
}  # fmt: skip
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
    with writing(path):
        for suffix in (".png", ".pdf"):
            metadata = {"CreationDate": None} if suffix == ".pdf" else None
            target = path.with_name(path.name + suffix)  # a model's name may hold dots
            with staged_file(target) as partial:
                figure.savefig(partial, format=suffix[1:], dpi=170, metadata=metadata)
            written.append(target)
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
    for shade, variable in THEME.items():
        text = text.replace(shade, f"var(--{variable})")
    return COORDINATES.sub(lambda found: re.sub(r"(\d+\.\d{2})\d+", r"\1", found[0]), text)


def label_of(model: Model) -> str:
    """A model by its name and what was done to it."""
    cut = model.cut
    return f"{model.name} ({cut.method}, {cut.key_dim} of {cut.width})" if cut else f"{model.name} (uncut)"


def literal(text: str) -> str:
    """As matplotlib draws it as it is, though it may hold what starts a formula."""
    return text.replace("$", r"\$")


def colours_of(models: Sequence[Model]) -> list[str]:
    """One colour per model; models that were not cut are drawn in ink, methods keep theirs while they are single."""
    taken: list[str] = []
    for number, model in enumerate(models):
        wanted = INK if model.cut is None else colour(number, model.cut.method)
        if wanted in taken:
            wanted = next((shade for shade in PALETTE if shade not in taken), PALETTE[number % len(PALETTE)])
        taken.append(wanted)
    return taken


def plain_log_ticks(axes: Axes) -> None:
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
