"""Figures from records, by matplotlib: each function takes records and returns a figure."""

from slimstate.system.errors import SlimstateError

try:
    import matplotlib  # noqa: F401  an extra
except ImportError as error:  # pragma: no cover
    raise SlimstateError("figures need matplotlib: pip install 'slimstate[report]'") from error
