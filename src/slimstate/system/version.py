"""The version of slimstate, for the package and for its builds."""

__version__ = "0.1.0"
