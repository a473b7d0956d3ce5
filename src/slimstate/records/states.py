"""What `analyze` measures: the states of a model over a text, and its convolution filters."""

import statistics
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from slimstate.core.standard_errors import standard_error
from slimstate.records.base import Record
from slimstate.records.parts import Model, Origin, Text
from slimstate.records.schema import NON_EMPTY, Count, Positive, Value, Whole

Numbers = Annotated[tuple[float, ...], NON_EMPTY]
ByHead = Annotated[tuple[Numbers, ...], NON_EMPTY]  # a list of heads for each layer
Filters = Annotated[Mapping[str, Annotated[tuple[ByHead, ...], NON_EMPTY]], NON_EMPTY]  # heads, channels, taps by role
MAX_LOGARITHM = 300


class Histogram(Value):
    """Counts of singular values by layer, head and bin; the bins divide log10 from `low` to `high`."""

    low: float
    high: float
    counts: Annotated[tuple[Annotated[tuple[Annotated[tuple[Count, ...], NON_EMPTY], ...], NON_EMPTY], ...], NON_EMPTY]


class Bounds(Value):
    """The number of sampled states and of violations of the bounds of the theory, and both sides of each bound."""

    states: Count
    violations: Count
    time: tuple[float, ...] = ()
    layer: tuple[float, ...] = ()
    head: tuple[float, ...] = ()
    effective_rank: tuple[float, ...] = ()
    key_bound: tuple[float | None, ...] = ()
    kappa: tuple[float | None, ...] = ()
    amplification: tuple[float | None, ...] = ()
    amplification_lower: tuple[float | None, ...] = ()
    amplification_upper: tuple[float | None, ...] = ()
    expected: tuple[float | None, ...] = ()
    expected_lower: tuple[float | None, ...] = ()
    expected_upper: tuple[float | None, ...] = ()


class TraceRecord(Record, Model, Origin):
    """The states of one model over one text. `curve` is the mean utilisation over layers and heads by time."""

    KIND = "trace"

    text: Text | None = None
    every: int | None = None
    skip: int | None = None
    capacity: Positive
    layers: Annotated[tuple[Count, ...], NON_EMPTY]
    heads: Whole
    times: Numbers
    utilisation: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    kappa: tuple[tuple[tuple[float | None, ...], ...], ...] | None = None
    curve: Numbers
    effective_rank: tuple[float, ...] | None = None
    utilisation_by_text: tuple[float, ...] = ()  # after `skip`
    utilisation_by_head: ByHead
    kappa_by_head: Annotated[tuple[Annotated[tuple[float | None, ...], NON_EMPTY], ...], NON_EMPTY]
    histogram: Histogram
    spectrum: Annotated[tuple[ByHead, ...], NON_EMPTY]
    bounds: Bounds

    @property
    def mean_utilisation(self) -> float:
        """The rank utilisation of the model, a mean over layers and heads."""
        return statistics.fmean(value for row in self.utilisation_by_head for value in row)

    def utilisation_over(self, other: "TraceRecord") -> tuple[float, float | None]:
        """Return the mean utilisation less that of another model, and its standard error over the same texts."""
        same = self.text is not None and other.text is not None and self.text.digest == other.text.digest
        error = standard_error(self.utilisation_by_text, other.utilisation_by_text) if same else None
        return self.mean_utilisation - other.mean_utilisation, error

    def contradiction(self) -> str | None:
        by_head = {name: getattr(self, name) for name in ("utilisation_by_head", "kappa_by_head", "spectrum")}
        for name, layers in {**by_head, "histogram.counts": self.histogram.counts}.items():
            if len(layers) != len(self.layers) or any(len(layer) != self.heads for layer in layers):
                return f"{name} must have {len(self.layers)} layers of {self.heads} heads"
        if any(not sum(head) for layer in self.histogram.counts for head in layer):
            return "histogram.counts has a head without a state"
        if self.histogram.high <= self.histogram.low:
            return "histogram.high must be above histogram.low"
        if len(self.curve) != len(self.times):
            return "curve and times differ in length"
        if any(abs(value) > MAX_LOGARITHM for layer in self.spectrum for head in layer for value in head):
            return f"spectrum must hold logarithms of singular values, within {MAX_LOGARITHM}"
        names = ("effective_rank", "amplification", "amplification_lower", "amplification_upper")
        if any(len(getattr(self.bounds, name)) != self.bounds.states for name in names):
            return f"bounds must hold {self.bounds.states} states"
        return None


class FiltersRecord(Record, Model, Origin):
    """Convolution filters of some layers by role, and the similarity within heads of all layers, by role and layer."""

    KIND = "filters"

    text: Text | None = None
    every: int | None = None
    skip: int | None = None
    filters: Annotated[Mapping[str, Filters], NON_EMPTY]
    likeness: Mapping[str, Annotated[Mapping[str, Numbers], NON_EMPTY]] = field(default_factory=dict)

    def contradiction(self) -> str | None:
        layers = list(self.filters.values())
        if any(layer.keys() != layers[0].keys() for layer in layers):
            return "filters must have the same roles in every layer"
        for layer in layers:
            for role, heads in layer.items():
                taps = {len(channel) for head in heads for channel in head}
                if len(taps) > 1 or len({len(head) for head in heads}) > 1:
                    return f"filters of the {role} differ in size from head to head"
        return None
