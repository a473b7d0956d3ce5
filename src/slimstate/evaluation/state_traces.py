"""Trace the states of a model as it reads: their spectra, how much of them is used, and the paper's bounds.

The text is read in segments, each from the cache of the one before it, and a state is reduced to statistics as soon as
it is seen: memory does not grow with the length of the text. L layers, G value heads, N times, K key dim, V value dim,
d = min(K, V).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slimstate.core.effective_rank import Memory, condition_number, effective_rank, rank_utilisation, state_bound
from slimstate.core.layout import Mixer
from slimstate.evaluation.options import check_times
from slimstate.models.hooks import StateReading, observed
from slimstate.models.load import Runtime
from slimstate.system import threads
from slimstate.system.errors import ModelError
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.value import Value

SEGMENT = 256  # tokens that go through the model together
EPSILON = torch.finfo(torch.float32).eps  # precision of a state, whatever that of the model is
EDGES = torch.linspace(-8, 3, 111, dtype=torch.float64)  # of histograms, in log10 of a singular value


class Trace(Value):
    """The states of one model over one text, by layer and head; `sampled` has one entry per reading and head.

    times [N]; utilisation, kappa [L, G, N]; histogram [L, G, bins] counts singular values by their log10 between
    EDGES, spectrum [L, G, d] is the mean of their log10 in descending order, by_text [B] the mean utilisation of each
    text, all three over the tokens after `skip`.
    """

    layers: tuple[int, ...]
    times: tuple[int, ...]
    skip: int
    capacity: int
    utilisation: Tensor
    by_text: Tensor
    kappa: Tensor
    histogram: Tensor
    spectrum: Tensor
    sampled: dict[str, Tensor]


def state_spectrum(state: Tensor) -> Tensor:
    """Return the singular values [..., d], descending, of float32 states [..., K, V].

    They come from the eigenvalues of the smaller Gram matrix in float64, which are as precise as a float32 state and
    take half the time of a singular value decomposition. They are computed on the CPU, a share in each thread: batches
    of small matrices are solved one after the other, and no faster on a GPU.
    """
    wide = state.double()
    gram = (wide @ wide.mT if state.shape[-2] <= state.shape[-1] else wide.mT @ wide).cpu()
    flat = gram.flatten(0, -3)
    parts = flat.tensor_split(min(len(flat), torch.get_num_threads()))
    with threads.pool_of_all_cores() as pool:
        squares = torch.cat(list(pool.map(torch.linalg.eigvalsh, parts))).unflatten(0, gram.shape[:-2])
    return squares.clamp_min(0).sqrt().flip(-1)


def _check_finite(values: Tensor, mixer: Mixer, what: str) -> None:
    if not bool(values.isfinite().all()):
        raise ModelError(f"layer {mixer.layer}: NaN or infinite values in {what}")


@dataclass
class _LayerStatistics:
    """Running statistics of one mixer."""

    mixer: Mixer
    skip: int
    pending: list[tuple[int, Tensor]] = field(default_factory=list)
    utilisation: list[Tensor] = field(default_factory=list)
    kappa: list[Tensor] = field(default_factory=list)
    histogram: Tensor = torch.tensor(0)
    logarithms: Tensor = torch.tensor(0.0)
    count: int = 0
    key_gram: Tensor = torch.tensor(0.0)
    sampled: list[dict[str, Tensor]] = field(default_factory=list)

    def reduce(self) -> None:
        """Add the pending states to the statistics, all at once, and release them."""
        if not self.pending:
            return
        states = torch.stack([state for _, state in self.pending])
        _check_finite(states, self.mixer, "the state")
        values = state_spectrum(states)  # [n, B, G, d]
        self.utilisation.append(rank_utilisation(values))
        self.kappa.append(condition_number(values, EPSILON / values.shape[-1]).log10().mean(1))
        late = [number for number, (time, _) in enumerate(self.pending) if time > self.skip]
        if late:
            self._count(values[late])
        self.pending.clear()

    def _count(self, values: Tensor) -> None:
        logarithms = values.clamp_min(10.0 ** float(EDGES[0])).log10()
        by_head = logarithms.flatten(0, 1).transpose(0, 1)  # [G, n * B, d]
        bins = torch.bucketize(by_head.flatten(1), EDGES[1:-1].contiguous())
        self.histogram = self.histogram + torch.stack([torch.bincount(row, minlength=len(EDGES) - 1) for row in bins])
        self.logarithms = self.logarithms + by_head.sum(1)
        self.count += by_head.shape[1]

    def test_bounds(self, reading: StateReading, time: int, generator: torch.Generator) -> None:
        """Read the state with its own query and random noise, and store the result beside the bounds of the theory."""
        state = reading.state.mT.double().cpu()
        _check_finite(state, self.mixer, "the state")
        _check_finite(self.key_gram, self.mixer, "the keys")
        groups = state.shape[1] // reading.queries.shape[2]
        query = reading.queries[:, -1].double().cpu().repeat_interleave(groups, dim=1)
        noise = torch.randn(query.shape, generator=generator, dtype=torch.float64)
        memory = Memory.of(state)
        sample = {
            "time": torch.full(query.shape[:-1], float(time)),
            "layer": torch.full(query.shape[:-1], float(self.mixer.layer)),
            "head": torch.arange(state.shape[1]).expand(query.shape[:-1]),
            "effective_rank": memory.effective_rank,
            "key_bound": state_bound(state, self.key_gram.cpu().repeat_interleave(groups, dim=1)),
            "kappa": memory.kappa,
            "amplification": memory.amplification(query, noise),
            "expected": memory.expected_error(query),
        }
        bounds = {
            "amplification": (memory.amplification_bounds(query, noise), memory.condition_bounds()),
            "expected": (memory.expected_bounds(query), memory.expected_condition_bounds()),
        }
        sample["holds"] = ~(sample["key_bound"] > sample["effective_rank"] * (1 + 1e-6))
        for name, (by_rank, by_condition) in bounds.items():
            sample["holds"] &= by_rank.hold(sample[name]) & by_condition.hold(sample[name])
            sample |= {f"{name}_lower": by_rank.lower, f"{name}_upper": by_rank.upper}
        self.sampled.append({name: value.flatten().double() for name, value in sample.items()})


def trace_states(
    runtime: Runtime, mixers: Sequence[Mixer], tokens: Tensor, *,
    every: int = 16, skip: int = 128, readings: int = 0, seed: int = 0, reporter: Reporter = SILENT,
) -> Trace:  # fmt: skip
    """Return statistics of the states of a model over tokens [B, T], measured after each `every` tokens.

    At `readings` of those times, spread evenly, each state is also read with its own query and noise drawn by `seed`.
    """
    length = tokens.shape[1]
    check_times(length, every, skip)
    times = tuple(range(every, length + 1, every))
    reading_times = {times[-1 - number * len(times) // readings] for number in range(readings)}
    layers = {mixer.layer: _LayerStatistics(mixer, skip) for mixer in mixers}
    generator = torch.Generator().manual_seed(seed)
    segment = max(every, SEGMENT // every * every)
    offset = 0

    def add_reading(reading: StateReading) -> None:
        layer, time = layers[reading.mixer.layer], offset + reading.time
        if reading_times:
            keys = reading.keys.double().transpose(1, 2)  # [B, H, t, K]
            layer.key_gram = layer.key_gram + keys.mT @ keys
        if reading.time % every == 0:
            layer.pending.append((time, reading.state.float()))
        if len(layer.pending) == segment // every:
            layer.reduce()
        if time in reading_times:
            layer.test_bounds(reading, time, generator)

    cache: Any = None
    cache_name = mixers[0].hook.cache
    with torch.inference_mode(), observed(runtime.model, mixers, add_reading, every):
        for ids in reporter.track(tokens.split(segment, dim=1), "following the states", -(-length // segment)):
            inputs = {"input_ids": ids.to(runtime.device, torch.long), cache_name: cache}
            cache = getattr(runtime.model.base_model(use_cache=True, **inputs), cache_name)
            offset += ids.shape[1]
        for layer in layers.values():
            layer.reduce()
    return _join(list(layers.values()), times, skip)


def _join(layers: list[_LayerStatistics], times: tuple[int, ...], skip: int) -> Trace:
    def stack(name: str) -> Tensor:
        return torch.stack([torch.cat(getattr(layer, name)).mT for layer in layers])

    sampled = [entry for layer in layers for entry in layer.sampled]
    names = sampled[0].keys() if sampled else ()
    logarithms = [layer.logarithms / layer.count for layer in layers]
    utilisation = torch.stack([torch.cat(layer.utilisation) for layer in layers])  # [L, N, B, G]
    return Trace(
        layers=tuple(layer.mixer.layer for layer in layers), times=times, skip=skip, capacity=logarithms[0].shape[-1],
        utilisation=utilisation.mean(2).mT, kappa=10 ** stack("kappa"),
        by_text=utilisation[:, torch.tensor(times) > skip].mean((0, 1, 3)), spectrum=torch.stack(logarithms),
        histogram=torch.stack([layer.histogram for layer in layers]),
        sampled={name: torch.cat([entry[name] for entry in sampled]) for name in names},
    )  # fmt: skip


class FinalUtilisation:
    """Mean rank utilisation of the last states of the first `windows` sequences of a run."""

    def __init__(self, key_dim: int, windows: int) -> None:
        self.key_dim, self.windows = key_dim, windows
        self.ranks: dict[int, list[Tensor]] = {}  # by layer, [sequences, heads] each

    def add_reading(self, reading: StateReading) -> None:
        ranks = self.ranks.setdefault(reading.mixer.layer, [])
        state = reading.state[: self.windows - sum(map(len, ranks))]
        if len(state):
            _check_finite(state, reading.mixer, "the state")
            ranks.append(effective_rank(state_spectrum(state.float())) / min(self.key_dim, state.shape[-1]))

    @property
    def mean(self) -> float:
        return float(torch.cat([part for ranks in self.ranks.values() for part in ranks]).mean())
