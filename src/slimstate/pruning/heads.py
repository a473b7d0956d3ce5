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
from slimstate.data.text import repeating
from slimstate.kernels.distillation import LOGITS_AT_ONCE, FullDistribution
from slimstate.models.devices import TOKENS_AT_ONCE, free_bytes
from slimstate.models.hooks import masked
from slimstate.models.load import SHARE_FOR_WEIGHTS, Runtime, load, states_before_head
from slimstate.pruning.calibration import calibrate
from slimstate.pruning.planning import SelectionJob
from slimstate.system import distributed
from slimstate.system.progress import Reporter

TOKENS = {"cuda": 16_384, "cpu": 4_096}  # of the measurement
CHANGE = 0.5  # share of the divergence from the uncut model that counts as a loss
SMALL = 0.1  # share of the cost of all layers, below which a layer stays as it is
GAIN = 0.1  # by which every step must lower the cost of a layer
WANTING, SPARE = 2, 2  # heads that may take places, and heads that may give theirs, in one step

Arranged = Callable[[Mixer, Tensor], Choice]  # returns the choice of a mixer whose heads have these origins


class Predictions:
    """The predictions of the uncut model on windows [n, length], with which those with one cut layer are compared."""

    def __init__(self, runtime: Runtime, windows: Tensor) -> None:
        self.model, self.device = runtime.model, runtime.device
        self.batches = distributed.share(windows.split(max(1, TOKENS_AT_ONCE[self.device.type] // windows.shape[1])))
        self.uncut = list(self._states())
        self.loss = self._loss()[0]

    def _states(self) -> Iterator[Tensor]:
        """Yield the states that the head of the model reads, of one batch after the other."""
        for batch in self.batches:
            with torch.inference_mode():
                yield states_before_head(self.model, batch.to(self.device, torch.long))[:, :-1].flatten(0, 1)

    def _loss(self) -> tuple[float, float]:
        """Return the next-token loss, and the divergence from the uncut model, in nats per token."""
        vocabulary = self.model.get_output_embeddings().weight
        sums = torch.tensor([0.0, 0.0, sum(map(len, self.uncut))], dtype=torch.float64, device=self.device)
        with torch.inference_mode():
            for batch, uncut, states in zip(self.batches, self.uncut, self._states(), strict=True):
                teacher, targets = FullDistribution(hidden=uncut, head=vocabulary), batch[:, 1:].flatten()
                for start in range(0, len(states), size := max(1, LOGITS_AT_ONCE // len(vocabulary))):
                    rows = slice(start, start + size)
                    logits = (states[rows] @ vocabulary.mT).float()
                    sums[0] += F.cross_entropy(logits, targets[rows].to(self.device, torch.long), reduction="sum")
                    sums[1] += teacher.divergence(rows, logits, 1.0)
        loss, divergence, tokens = distributed.sum_over_all(sums).tolist()
        return loss / tokens, divergence / tokens

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
    if not is_possible or job.selector.rotates:
        return {}
    place, size = job.run.place, checkpoint.parameters * job.run.precision.itemsize
    copies = distributed.count_here() if place.type == "cpu" else 1
    if not distributed.from_main(lambda: copies * size <= SHARE_FOR_WEIGHTS * free_bytes(place)):
        reporter.say("every head is made from its own: the model does not fit into memory as a whole")
        return {}
    with reporter.waiting("loading the model"):
        runtime = load(checkpoint.folder, device=job.run.device, dtype=job.run.dtype)
    windows = windows[-max(1, TOKENS[runtime.device.type] // windows.shape[1]) :]
    distributed.join(runtime.device)
    needs = job.needs - {"weight"}
    evidence = calibrate(runtime, mixers, windows, needs, reporter) if needs else {}

    @functools.cache
    def choice(mixer: Mixer, origins: tuple[int, ...]) -> Choice:
        return job.choices([mixer], evidence, {mixer.layer: torch.tensor(origins)})[mixer.layer]

    predictions = Predictions(runtime, repeating(windows, job.request.seed))
    found = find_origins(predictions, mixers, lambda mixer, origins: choice(mixer, tuple(origins.tolist())), reporter)
    if found:
        layers = f"layer{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
        reporter.say(f"{layers}: heads that lose most take the places of others (not with `keep_heads`)")
    return found


def find_origins(
    predictions: Predictions, mixers: Sequence[Mixer], arranged: Arranged, reporter: Reporter
) -> dict[int, Tensor]:
    """Return the origins of the heads of every layer in which other ones than their own cost less."""
    layers = reporter.track(mixers, "measuring layers", len(mixers))
    costs = [predictions.cost(mixer, arranged(mixer, torch.arange(mixer.axis.heads))) for mixer in layers]
    smallest = SMALL * sum(cost for cost in costs if cost > 0)
    costly = [(mixer, cost) for mixer, cost in zip(mixers, costs, strict=True) if cost > smallest]
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
    while cost > 0:
        counts = torch.bincount(origins, minlength=heads).tolist()
        candidates = []
        for head in [head for head in by_want if counts[head]][:WANTING]:
            spare = [other for other in by_spare if other != head and counts[other]][:SPARE]
            given = [[other] for other in spare] + [spare] * (len(spare) > 1)
            candidates += [_given(origins, head, others) for others in given if counts[head] + len(others) <= most]
        measured = [(predictions.cost(mixer, arranged(mixer, each)), each) for each in candidates]
        best, arrangement = min(measured, key=lambda pair: pair[0], default=(cost, origins))
        if not best < (1 - GAIN) * cost:
            break
        cost, origins = best, arrangement
    return origins, cost


def _given(origins: Tensor, head: int, others: Sequence[int]) -> Tensor:
    """Return the origins after a head took one place of each of the others."""
    result = origins.clone()
    for other in others:
        result[int((result == other).nonzero()[-1])] = head
    return result
