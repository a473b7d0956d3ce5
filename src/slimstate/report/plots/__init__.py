"""Figures from records, by matplotlib. Nothing here loads a model: records are all it sees.

Each function takes records and gives a figure; `style` has what all figures share, and how they are written.
"""

from slimstate.system.errors import SlimstateError

try:
    import matplotlib  # noqa: F401  an extra
except ImportError as error:  # pragma: no cover
    raise SlimstateError("figures need matplotlib: pip install 'slimstate[report]'") from error

from slimstate.report.plots.results import layer_errors, loss_curves, pareto, recall_curves
from slimstate.report.plots.states import (
    STATES_DRAWN,
    draw_analysis,
    filter_maps,
    find_head,
    ordered_spectra,
    retrieval,
    spectra,
    utilisation_curves,
    utilisation_maps,
)
from slimstate.report.plots.style import MUTED, PALETTE, label_of, new_figure, plain_log_ticks, save, styled, svg

__all__ = [
    "MUTED",
    "PALETTE",
    "STATES_DRAWN",
    "draw_analysis",
    "filter_maps",
    "find_head",
    "label_of",
    "layer_errors",
    "loss_curves",
    "new_figure",
    "ordered_spectra",
    "pareto",
    "plain_log_ticks",
    "recall_curves",
    "retrieval",
    "save",
    "spectra",
    "styled",
    "svg",
    "utilisation_curves",
    "utilisation_maps",
]
