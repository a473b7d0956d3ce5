"""Choose the uncut heads that the heads of a cut are made from.

All heads of a cut have the same key dim, but not all need it: in a layer that recalls, one head loses almost all that
the cut loses, and others can be removed at little cost. Several heads of the cut can then be made from that head: each
has its values, and its channels are divided among them.

The output of the layer does not show which heads these are, as it changes more where a head is removed. So the whole
model predicts windows with repetitions, which show what a state still remembers. The cost of a cut of one layer is what
it adds to the loss, and half of the divergence from the uncut model, which training partly removes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.layout import Mixer
from slimstate.core.selection import Choice, Selection
from slimstate.data.text import repeating
from slimstate.kernels.distillation import FullDistribution, distilled_loss
from slimstate.models.devices import TOKENS_AT_ONCE, free_bytes
from slimstate.models.hooks import masked
from slimstate.models.load import SHARE_FOR_WEIGHTS, Runtime, load, states_before_head
from slimstate.pruning.calibration import calibrate
from slimstate.pruning.planning import SelectionJob
from slimstate.system import distributed
from slimstate.system.progress import Reporter

TOKENS = {"cuda": 65_536, "cpu": 4_096}  # of the measurement
DIVERGENCE = 0.5  # weight of the divergence from the uncut model beside the loss
SMALL, LEAST = 0.1, 0.02  # share of the cost of all layers, and nats, below which a layer stays as it is
GAIN = 0.1  # by which every step must lower the cost of a layer
TAKERS, GIVERS = 2, 2  # heads that may take places, and heads that may give theirs, in one step

Chooser = Callable[[Mixer, Tensor], Choice]  # returns the choice of a mixer whose heads have these origins


class Predictions:
    """The predictions of the uncut model on windows [n, length], with which those with one cut layer are compared."""

    def __init__(self, runtime: Runtime, windows: Tensor) -> None:
        self.model, self.device = runtime.model, runtime.device
        self.batches = distributed.share(windows.split(max(1, TOKENS_AT_ONCE[self.device.type] // windows.shape[1])))
        self.uncut = list(self._states())
        self.loss = self._loss()

    def _states(self) -> Iterator[Tensor]:
        """Yield the states that the head of the model reads, of one batch after the other."""
        for batch in self.batches:
            with torch.no_grad():
                yield states_before_head(self.model, batch.to(self.device, torch.long))[:, :-1].flatten(0, 1)

    def _loss(self) -> float:
        """Return the next-token loss and the weighted divergence from the uncut model, in nats per token."""
        vocabulary = self.model.get_output_embeddings().weight.detach()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # of nats, and of tokens
        for batch, uncut, states in zip(self.batches, self.uncut, self._states(), strict=True):
            targets, teacher = batch[:, 1:].flatten(), FullDistribution(hidden=uncut, head=vocabulary)
            targets = targets.to(self.device, torch.long)
            loss, *_ = distilled_loss(states, vocabulary, targets, teacher, temperature=1.0, weight=DIVERGENCE)
            sums += torch.stack([loss * len(states), loss.new_tensor(len(states))])
        nats, tokens = distributed.sum_over_all(sums).tolist()
        return nats / tokens

    def cost(self, mixer: Mixer, choice: Choice, head: int | None = None) -> float:
        """Return what the model loses with one layer cut, or one head of it."""
        with masked(self.model, [mixer], {mixer.layer: choice}, head=head):
            return self._loss() - self.loss


def chooses_origins(checkpoint: Checkpoint) -> bool:
    """Return whether the heads of a cut may be made from others: not in hybrids, whose softmax layers remember too."""
    has_softmax = bool(checkpoint.family.softmax_layers(checkpoint.config))
    return not has_softmax and all(mixer.scalars is not None for mixer in checkpoint.mixers)


def measure_origins(job: SelectionJob, windows: Tensor) -> dict[int, Tensor]:
    """Return the uncut heads that the heads of a cut are made from, for the layers in which that costs less.

    The whole model runs; where that is not possible, a line says so and every head is made from its own.
    """
    checkpoint, mixers, reporter, place = job.checkpoint, job.checkpoint.mixers, job.reporter, job.run.place
    cuts_keys = job.request.keep < mixers[0].axis.width
    if not cuts_keys or job.selector.rotates or not chooses_origins(checkpoint):
        return {}
    size = checkpoint.parameters * job.run.precision.itemsize
    size *= distributed.count_here() if place.type == "cpu" else 1
    if not distributed.from_main(lambda: size <= SHARE_FOR_WEIGHTS * free_bytes(place)):
        reporter.say("every head is made from its own: the model does not fit into memory as a whole")
        return {}
    with reporter.waiting("loading the model"):
        runtime = load(checkpoint.folder, device=job.run.device, dtype=job.run.dtype)
    windows = windows[-max(1, TOKENS[runtime.device.type] // windows.shape[1]) :]
    distributed.join(runtime.device)
    needs = job.needs - {"weight"}
    evidence = calibrate(runtime, mixers, windows, needs, reporter) if needs else {}

    def choose(mixer: Mixer, origins: Tensor) -> Choice:
        return replace(job, origins={mixer.layer: origins}).choices([mixer], evidence)[mixer.layer]

    try:
        result = find_origins(Predictions(runtime, repeating(windows, job.request.seed)), mixers, choose, reporter)
    except torch.OutOfMemoryError:
        if distributed.count() > 1:  # the other processes wait for this one
            raise
        reporter.say("every head is made from its own: measuring others ran out of memory")
        return {}
    if result:
        layers = f"layer{'s' * (len(result) > 1)} {', '.join(map(str, result))}"
        reporter.say(f"{layers}: heads that lose most take the places of others (not with `keep_heads`)")
    return result


def find_origins(
    predictions: Predictions, mixers: Sequence[Mixer], choose: Chooser, reporter: Reporter
) -> dict[int, Tensor]:
    """Return the uncut heads that the heads of a layer are made from, for the layers in which that costs less."""
    layers = reporter.track(mixers, "measuring layers", len(mixers))
    costs = [predictions.cost(mixer, choose(mixer, torch.arange(mixer.axis.heads))) for mixer in layers]
    reporter.detail(f"a cut of one layer costs {', '.join(f'{cost:.4f}' for cost in costs)}")
    smallest = max(LEAST, SMALL * sum(cost for cost in costs if cost > 0))
    costly = [(mixer, cost) for mixer, cost in zip(mixers, costs, strict=True) if cost > smallest]
    result = {}
    for mixer, before in reporter.track(costly, "measuring heads", len(costly)):
        origins, cost = _search(predictions, mixer, choose, before, reporter)
        if cost < before:
            result[mixer.layer] = origins
            reporter.detail(f"layer {mixer.layer}: heads from {origins.tolist()}, cost {before:.4f} to {cost:.4f}")
    return result


def _search(
    predictions: Predictions, mixer: Mixer, choose: Chooser, cost: float, reporter: Reporter
) -> tuple[Tensor, float]:
    """Return the origins of a layer, for which heads give their places away step by step, and their cost."""
    heads, width, own = mixer.axis.heads, mixer.axis.width, torch.arange(mixer.axis.heads)
    cut, everything = choose(mixer, own), torch.arange(width).expand(heads, -1)
    most = -(-width // cut.key_dim)  # copies of a head that have all of its channels
    others = [Selection(keep=everything, origins=own.where(own != head, (head + 1) % heads)) for head in own.tolist()]
    without = [predictions.cost(mixer, choice) for choice in others]  # each of the heads
    alone = [predictions.cost(mixer, cut, head) for head in range(heads)]  # if it alone is cut
    for title, numbers in (("cut alone", alone), ("removed alone", without)):
        reporter.detail(f"layer {mixer.layer}: heads {title} cost {', '.join(f'{number:.4f}' for number in numbers)}")
    by_need = sorted(range(heads), key=lambda head: -alone[head])
    by_use = sorted(range(heads), key=lambda head: without[head])
    origins = own
    while cost > 0:
        counts = torch.bincount(origins, minlength=heads).tolist()
        candidates = []
        for head in [head for head in by_need if counts[head]][:TAKERS]:
            givers = [other for other in by_use if other != head and counts[other]][:GIVERS]
            groups = [[other] for other in givers] + [givers] * (len(givers) > 1)
            candidates += [_replace(origins, group, head) for group in groups if counts[head] + len(group) <= most]
        costs = [(predictions.cost(mixer, choose(mixer, candidate)), candidate) for candidate in candidates]
        best, candidate = min(costs, key=lambda pair: pair[0], default=(cost, origins))
        if not best < (1 - GAIN) * cost:
            break
        cost, origins = best, candidate
    return origins, cost


def _replace(origins: Tensor, heads: Sequence[int], by: int) -> Tensor:
    """Return the origins after each of the heads left one of its places to another."""
    result = origins.clone()
    for head in heads:
        result[int((result == head).nonzero()[-1])] = by
    return result
