"""The records of `analyze`: traces of the states of models, and their convolution filters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.standard_errors import standard_error
from slimstate.evaluation.options import TraceOptions
from slimstate.evaluation.state_traces import EDGES, trace_states
from slimstate.models.load import load
from slimstate.models.options import RunOptions
from slimstate.records.base import Displayable
from slimstate.records.states import Bounds, ByHead, FiltersRecord, Histogram, Numbers, TraceRecord
from slimstate.system.json_files import plain
from slimstate.system.progress import Reporter
from slimstate.system.value import Value

BOUND_TIMES = 4  # times at which the bounds are tested


class StateUse(Value):
    """How much of its states one model uses, and how many of the sampled states violate a bound of the theory.

    Standard errors are over texts; `over_first` is the utilisation less that of the first model.
    """

    name: str
    key_dim: int | None
    utilisation: float
    utilisation_error: float | None
    over_first: float | None
    over_first_error: float | None
    effective_rank: float
    states: int
    violations: int

    @classmethod
    def of(cls, trace: TraceRecord, first: TraceRecord) -> "StateUse":
        over_first, error = (None, None) if trace is first else trace.utilisation_over(first)
        return cls(
            name=trace.name, key_dim=trace.key_dim, utilisation=trace.mean_utilisation,
            utilisation_error=standard_error(trace.utilisation_by_text), over_first=over_first, over_first_error=error,
            effective_rank=trace.mean_utilisation * trace.capacity, states=trace.bounds.states,
            violations=trace.bounds.violations,
        )  # fmt: skip


class Analysis(Displayable):
    """The folder of the records, a summary of each model, and the figures."""

    out: str
    models: tuple[StateUse, ...]
    figures: tuple[str, ...]
    seconds: float

    def headline(self) -> str:
        return f"how much of their states {len(self.models)} models use" if len(self.models) > 1 else "state in use"

    def table(self) -> list[dict[str, object]]:
        """Return one row for every model."""
        return [vars(model) for model in self.models]


def trace_model(
    checkpoint: Checkpoint, tokens: Tensor, about: Mapping[str, Any], options: TraceOptions, run: RunOptions,
    reporter: Reporter,
) -> TraceRecord:  # fmt: skip
    """Load a model and return the trace of its states over tokens; `about` has more fields of the record."""
    with reporter.waiting(f"loading {about['name']}"):
        runtime = load(checkpoint.folder, device=run.device, dtype=run.dtype)
    reporter.say(f"{about['name']}: kernels: {runtime.kernels}")
    trace = trace_states(
        runtime, checkpoint.mixers, tokens, every=options.every, skip=options.skip, readings=BOUND_TIMES,
        seed=options.seed, reporter=reporter,
    )  # fmt: skip
    late = torch.tensor(trace.times) > trace.skip
    mean = trace.utilisation.mean((0, 1))
    sampled = {name: to_digits(values, 6) for name, values in trace.sampled.items() if name != "holds"}
    return TraceRecord(
        **about,
        kernels=runtime.kernels,
        capacity=trace.capacity,
        layers=trace.layers,
        heads=trace.utilisation.shape[1],
        times=trace.times,
        utilisation=to_digits(trace.utilisation, 5),
        kappa=to_digits(trace.kappa, 4),
        curve=to_digits(mean, 6),
        effective_rank=to_digits(mean * trace.capacity, 6),
        utilisation_by_text=to_digits(trace.by_text, 6),
        utilisation_by_head=to_digits(trace.utilisation[..., late].mean(-1), 5),
        kappa_by_head=to_digits(trace.kappa[..., late].median(-1).values, 4),
        histogram=Histogram(low=float(EDGES[0]), high=float(EDGES[-1]), counts=to_digits(trace.histogram)),
        spectrum=to_digits(trace.spectrum, 5),
        bounds=Bounds(
            states=len(trace.sampled.get("holds", ())),
            violations=int((trace.sampled["holds"] == 0).sum()) if trace.sampled else 0,
            **sampled,
        ),
    )


def filters_record(checkpoint: Checkpoint, about: Mapping[str, Any]) -> FiltersRecord:
    """Return the filters of the first, the middle and the last mixer, and the similarity within each head of all."""
    mixers = checkpoint.mixers
    layers = {mixers[0].layer, mixers[len(mixers) // 2].layer, mixers[-1].layer}
    filters: dict[str, dict[str, tuple[ByHead, ...]]] = {}
    likeness: dict[str, dict[str, Numbers]] = {}
    for mixer in mixers:
        for role, axis in mixer.filters:
            slot = axis.slots[0]
            weight = checkpoint.read(mixer.name_of(slot)).float().flatten(1)
            by_head = weight[axis.all_rows(slot)[0]]  # [heads, width, filter size]
            if mixer.layer in layers:
                filters.setdefault(str(mixer.layer), {})[role] = to_digits(by_head, 3)
            unit, count = torch.nn.functional.normalize(by_head, dim=-1), by_head.shape[1]
            cosine = (unit.sum(1).square().sum(-1) - count) / max(1, count * (count - 1))  # mean over pairs, [heads]
            likeness.setdefault(role, {})[str(mixer.layer)] = to_digits(cosine, 3)
    return FiltersRecord(**about, filters=filters, likeness=likeness)


def to_digits(values: Tensor, digits: int | None = None) -> Any:
    """Return the numbers as nested tuples, rounded to significant digits; None where one is not finite."""
    return _as_tuples(plain(values, digits))


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
