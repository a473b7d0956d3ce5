"""Forward to `slimstate.records.numbers` until `evaluation` and `cli` import it from there."""

from slimstate.records.numbers import HUGE, fixed, perplexity

__all__ = ["HUGE", "fixed", "perplexity"]
