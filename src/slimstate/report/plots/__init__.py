"""Figures from records, by matplotlib.

Each function takes records and returns a figure; `draw_analysis` and `draw_sweep` write all files of a record.
"""

from slimstate.system.errors import SlimstateError

try:
    import matplotlib  # noqa: F401  an extra
except ImportError as error:  # pragma: no cover
    raise SlimstateError("figures need matplotlib: pip install 'slimstate[report]'") from error

from slimstate.report.plots.results import draw_sweep, pareto
from slimstate.report.plots.states import draw_analysis, find_head, utilisation_curves
from slimstate.report.plots.style import MUTED, PALETTE, label_of, new_figure, plain_log_ticks, save, styled, svg

__all__ = [
    "MUTED", "PALETTE", "draw_analysis", "draw_sweep", "find_head", "label_of", "new_figure", "pareto",
    "plain_log_ticks", "save", "styled", "svg", "utilisation_curves",
]  # fmt: skip
