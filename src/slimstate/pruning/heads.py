"""Choose the uncut heads that the heads of a cut are made from.

All heads of a cut have the same key dim, and few need it. In a layer that recalls, one head loses almost all that a cut
loses, and others can go. Such a head takes their places: its channels are dealt among all heads that are made from it,
each of which stores its values.

An arrangement of one layer is judged by the predictions of the whole model, on windows that repeat themselves: only
there is it seen what a state still remembers. What heads computed that are gone can be learnt by the others, and counts
less: the cost of an arrangement is the loss, and a part of the divergence from the uncut model.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.core.layout import Mixer
from slimstate.core.selection import Choice, Selection
from slimstate.kernels.distillation import LOGITS_AT_ONCE, FullDistribution
from slimstate.models.devices import TOKENS_AT_ONCE, free_bytes
from slimstate.models.hooks import masked
from slimstate.models.load import SHARE_FOR_WEIGHTS, Runtime, load, states_before_head
from slimstate.pruning.calibration import calibrate
from slimstate.pruning.planning import SelectionJob
from slimstate.system import distributed
from slimstate.system.progress import Reporter

TOKENS = {"cuda": 16_384, "cpu": 2_048}  # of the measurement
CHANGE = 0.5  # share of the divergence from the uncut model that counts as a loss
SMALL = 0.1  # share of the cost of all layers, below which a layer stays as it is
GAIN = 0.1  # by which every step must lower the cost of a layer
WANTING, SPARE = 2, 2  # heads that may take places, and heads that may give theirs, in one step
SPAN, FEWEST_SPANS, REPEATED = 32, 8, 0.5  # tokens of a span, spans of a window, share of them that are repetitions

Arranged = Callable[[Mixer, Tensor], Choice]  # returns the choice of a mixer whose heads have these origins


class Predictions:
    """The predictions of the uncut model on windows [n, length], with which those with one cut layer are compared."""

    def __init__(self, runtime: Runtime, windows: Tensor) -> None:
        self.model, self.device = runtime.model, runtime.device
        self.batches = windows.split(max(1, TOKENS_AT_ONCE[self.device.type] // windows.shape[1]))
        self.uncut = list(self._states())
        self.loss = self._loss()[0]

    def _states(self) -> Iterator[Tensor]:
        """Yield the states that the head of the model reads, of one batch after the other."""
        for batch in self.batches:
            with torch.inference_mode():
                yield states_before_head(self.model, batch.to(self.device, torch.long))[:, :-1].flatten(0, 1)

    def _loss(self) -> tuple[float, float]:
        """Return the next-token loss, and the divergence from the uncut model, in nats per token."""
        vocabulary, tokens = self.model.get_output_embeddings().weight, sum(map(len, self.uncut))
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.inference_mode():
            for batch, uncut, states in zip(self.batches, self.uncut, self._states(), strict=True):
                teacher, targets = FullDistribution(hidden=uncut, head=vocabulary), batch[:, 1:].flatten()
                for start in range(0, len(states), size := max(1, LOGITS_AT_ONCE // len(vocabulary))):
                    rows = slice(start, start + size)
                    logits = (states[rows] @ vocabulary.mT).float()
                    sums[0] += F.cross_entropy(logits, targets[rows].to(self.device, torch.long), reduction="sum")
                    sums[1] += teacher.divergence(rows, logits, 1.0)
        loss, divergence = (sums / tokens).tolist()
        return loss, divergence

    def cost(self, mixer: Mixer, choice: Choice, head: int | None = None) -> float:
        """Return what the model loses with one layer cut, or one head of it."""
        with masked(self.model, [mixer], {mixer.layer: choice}, head=head):
            loss, divergence = self._loss()
        return loss - self.loss + CHANGE * divergence


def measure_origins(job: SelectionJob, windows: Tensor) -> dict[int, Tensor]:
    """Return the origins of the heads of a cut, by layer, where other ones than their own cost less.

    The whole model runs; where that is not possible, a line says so and every head is made from its own.
    """
    checkpoint, mixers, reporter = job.checkpoint, job.checkpoint.mixers, job.reporter
    is_possible = all(mixer.scalars is not None for mixer in mixers) and job.request.keep < mixers[0].axis.width
    if not is_possible or job.selector.rotates or distributed.count() > 1:
        return {}
    size = checkpoint.parameters * job.run.precision.itemsize
    if size > SHARE_FOR_WEIGHTS * free_bytes(job.run.place):
        reporter.say("every head is made from its own: the model does not fit into memory as a whole")
        return {}
    with reporter.waiting("loading the model"):
        runtime = load(checkpoint.folder, device=job.run.device, dtype=job.run.dtype)
    windows = windows[-max(1, TOKENS[runtime.device.type] // windows.shape[1]) :]
    evidence = calibrate(runtime, mixers, windows, job.needs - {"weight"}, reporter)

    @functools.cache
    def choice(mixer: Mixer, origins: tuple[int, ...]) -> Choice:
        return job.choices([mixer], evidence, {mixer.layer: torch.tensor(origins)})[mixer.layer]

    predictions = Predictions(runtime, repeating(windows, job.request.seed))
    return find_origins(predictions, mixers, lambda mixer, origins: choice(mixer, tuple(origins.tolist())), reporter)


def find_origins(
    predictions: Predictions, mixers: Sequence[Mixer], arranged: Arranged, reporter: Reporter
) -> dict[int, Tensor]:
    """Return the origins of the heads of every layer in which other ones than their own cost less."""
    layers = reporter.track(mixers, "measuring layers", len(mixers))
    costs = [predictions.cost(mixer, arranged(mixer, torch.arange(mixer.axis.heads))) for mixer in layers]
    costly = [(mixer, cost) for mixer, cost in zip(mixers, costs, strict=True) if cost > SMALL * sum(costs)]
    found = {}
    for mixer, before in reporter.track(costly, "measuring heads", len(costly)):
        origins, cost = _rearrange(predictions, mixer, arranged, before)
        if cost < before:
            found[mixer.layer] = origins
            reporter.detail(f"layer {mixer.layer}: heads from {origins.tolist()}, cost {before:.4f} to {cost:.4f}")
    return found


def _rearrange(predictions: Predictions, mixer: Mixer, arranged: Arranged, cost: float) -> tuple[Tensor, float]:
    """Return the origins of a layer, found by giving places away step by step, and their cost."""
    heads, width, own = mixer.axis.heads, mixer.axis.width, torch.arange(mixer.axis.heads)
    cut, everything = arranged(mixer, own), torch.arange(width).expand(heads, -1)
    most = -(-width // cut.key_dim)  # copies of a head that have all of its channels
    missing = [Selection(keep=everything, origins=own.where(own != head, (head + 1) % heads)) for head in own.tolist()]
    without = [predictions.cost(mixer, choice) for choice in missing]  # each of the heads
    alone = [predictions.cost(mixer, cut, head) for head in range(heads)]  # if it alone is cut
    by_want = sorted(range(heads), key=lambda head: -alone[head])
    by_spare = sorted(range(heads), key=lambda head: without[head])
    origins = own
    while True:
        counts = torch.bincount(origins, minlength=heads).tolist()
        candidates = []
        for head in [head for head in by_want if counts[head]][:WANTING]:
            spare = [other for other in by_spare if other != head and counts[other]][:SPARE]
            for given in ([other] for other in spare), [spare]:
                candidates += [_given(origins, head, each) for each in given if counts[head] + len(each) <= most]
        measured = [(predictions.cost(mixer, arranged(mixer, each)), each) for each in candidates]
        best, arrangement = min(measured, key=lambda pair: pair[0], default=(cost, origins))
        if not best < (1 - GAIN) * cost:
            return origins, cost
        cost, origins = best, arrangement


def _given(origins: Tensor, head: int, others: Sequence[int]) -> Tensor:
    """Return the origins after a head took one place of each of the others."""
    result = origins.clone()
    for other in others:
        result[int((result == other).nonzero()[-1])] = head
    return result


def repeating(windows: Tensor, seed: int) -> Tensor:
    """Return the windows [n, length] with half of their spans replaced by earlier ones of the same window."""
    length = windows.shape[1]
    size = max(1, min(SPAN, length // FEWEST_SPANS))
    spans = list(windows.split(size, dim=1))
    generator = torch.Generator().manual_seed(seed)
    for place in range(1, length // size):
        earlier = torch.randint(place, (len(windows),), generator=generator)
        repeats = torch.rand(len(windows), 1, generator=generator) < REPEATED
        copies = torch.stack(spans[:place])[earlier, torch.arange(len(windows))]
        spans[place] = copies.where(repeats, spans[place])
    return torch.cat(spans, dim=1)
