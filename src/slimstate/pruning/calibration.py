"""Run token windows through a model and sum statistics of its key and query channels.

Only sums are stored, so memory does not grow with the number of tokens. Several processes share the batches, and their
sums are added.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.core.evidence import BACKWARD, Evidence, EvidenceFile, Needs
from slimstate.core.layout import Axis, Mixer, Slot
from slimstate.kernels.distillation import distilled_loss
from slimstate.kernels.fla_calls import unit
from slimstate.models.devices import TOKENS_AT_ONCE
from slimstate.models.hooks import Role, hooked
from slimstate.models.load import Runtime, states_before_head
from slimstate.models.speed import WITH_GRADIENT
from slimstate.system import distributed
from slimstate.system.errors import DataError, ModelError, OutputError, PlanError, quoted
from slimstate.system.json_files import JsonObject
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.value import Value

TIMES_FORWARD = {  # cost of a calibration that collects this evidence, in passes forward
    "gram": 1.25, "moments": 1.25, "input": 1.05, "gradient": WITH_GRADIENT, "weighted": 3.4,
    "output": 1.05, "output gradient": WITH_GRADIENT,
}  # fmt: skip
SECONDS_BETWEEN_SAVES = 60  # of the sums of a calibration


class Sums:
    """Running sums of one mixer, on the model's device."""

    def __init__(self, mixer: Mixer, device: torch.device, needs: Needs) -> None:
        heads, width, size = mixer.axis.heads, mixer.axis.width, mixer.input_size
        self.tokens, self.device = 0, device
        self.row_mask: dict[str, Tensor] | None = None  # [B, T], 1 for the rows of the batch that Gram matrices sum
        self.tensors: dict[str, Tensor] = {}
        for need, side in (("gram", width), ("weighted", width), ("moments", width + 1)):
            if need in needs:
                for role in ("query", "key"):
                    shape = heads, side, side
                    self.tensors[f"{role}_{need}"] = torch.zeros(shape, dtype=torch.float64, device=device)
        if "input" in needs:
            self.tensors["input_square"] = torch.zeros(size, dtype=torch.float64, device=device)
        if mixer.value_axis is not None and "output" in needs:
            self._columns = mixer.value_axis.all_rows(mixer.value_axis.output).permute(1, 2, 0).to(device)
            self.tensors["output_square"] = torch.zeros(self._columns.shape, dtype=torch.float64, device=device)
        for role, axis, slot in _differentiated(mixer, needs):
            shape = axis.heads, axis.width, slot.copies * size
            self.tensors[f"{role}_gradient"] = torch.zeros(shape, dtype=torch.float32, device=device)

    def add_activations(self, role: Role, x: Tensor) -> None:
        """Add x [B, T, H, D]; one product per sequence and head, because a few long ones leave most of a GPU idle."""
        by_head = x.detach().transpose(1, 2).to(torch.float64, memory_format=torch.contiguous_format)
        if f"{role}_gram" in self.tensors:
            rows, mask = by_head, self.row_mask
            rows = rows if mask is None else rows * mask[role].to(rows)[:, None, :, None]
            self.tensors[f"{role}_gram"] += (rows.mT @ rows).sum(0).to(self.device)
        if f"{role}_moments" in self.tensors:
            lengthened = F.pad(unit(by_head), (0, 1), value=1.0)
            self.tensors[f"{role}_moments"] += (lengthened.mT @ lengthened).sum(0).to(self.device)

    def add_weighted(self, role: Role, x: Tensor, gradient: Tensor) -> None:
        """Add x [B, T, H, D], weighted by the gradient of the loss with respect to it."""
        squares = gradient.double().square().sum(-1, keepdim=True)
        by_head, weights = (y.transpose(1, 2) for y in (x.double(), squares))
        self.tensors[f"{role}_weighted"] += (by_head.mT @ (by_head * weights)).sum(0).to(self.device)

    def add_squares(self, name: str, x: Tensor) -> None:
        """Add x [..., size], the input of the mixer or of its output projection."""
        squares = x.detach().flatten(0, -2).double().square().sum(0).to(self.device)
        self.tensors[name] += squares if name == "input_square" else squares[self._columns]

    def evidence(self) -> Evidence:
        return Evidence(tokens=self.tokens, **{name: tensor.cpu() for name, tensor in self.tensors.items()})


class PartialEvidence(Value):
    """The sums of a calibration so far, in an evidence file from which an interrupted one continues.

    `calibration` describes all windows; `model` returns the fingerprint of the model.
    """

    path: Path
    calibration: JsonObject
    model: Callable[[], str]

    def resume(self, mixers: Sequence[Mixer], sums: dict[int, Sums]) -> int:
        """Fill in the sums of the same calibration, if they are there, and return the number of their windows."""
        if not os.path.lexists(self.path):
            return 0
        if not EvidenceFile.is_one(self.path):
            problem = "exists and is not an unfinished calibration: move it, or choose another `out`"
            raise OutputError(f"{quoted(self.path)} {problem}")
        try:
            file = EvidenceFile.open(self.path)
            file.check_fits(self.path, mixers)
        except DataError:  # it is damaged
            return 0
        stored = {layer: dict(entry.tensors()) for layer, entry in file.evidence.items()}
        windows = int(file.calibration["samples"])
        same_needs = all(stored[layer].keys() == entry.tensors.keys() for layer, entry in sums.items())
        if not same_needs or (file.model, file.calibration) != (self.model(), self._describe(windows)):
            return 0
        for layer, entry in sums.items():
            entry.tokens = file.evidence[layer].tokens
            for name, tensor in entry.tensors.items():
                tensor.copy_(stored[layer][name])
        return windows

    def save(self, sums: dict[int, Sums], windows: int) -> None:
        evidence = {layer: entry.evidence() for layer, entry in sums.items()}
        with suppress(OutputError):  # the calibration itself does not need the file
            EvidenceFile(model=self.model(), calibration=self._describe(windows), evidence=evidence).save(self.path)

    def _describe(self, windows: int) -> JsonObject:
        return {**self.calibration, "samples": windows}


def calibrate(
    runtime: Runtime, mixers: Sequence[Mixer], tokens: Tensor, needs: Needs, reporter: Reporter = SILENT,
    row_mask: Tensor | None = None, earlier: PartialEvidence | None = None,
) -> dict[int, Evidence]:  # fmt: skip
    """Return the evidence of every mixer by layer, from windows `tokens` [samples, length]; equal on all processes.

    `row_mask` [samples, 2, length] is 1 for the queries and keys that Gram matrices sum, by default all. With
    `earlier`, a single process continues an interrupted calibration, and saves its own sums every minute.
    """
    if BACKWARD & needs and runtime.offloaded:
        raise PlanError(
            f"gradients need all weights on the device, and {runtime.offloaded} are not: use another method, a smaller"
            " `dtype`, or more GPUs"
        )
    distributed.join(runtime.device)
    sums = {mixer.layer: Sums(mixer, runtime.device, needs) for mixer in mixers}
    batch = max(1, TOKENS_AT_ONCE[runtime.device.type] // tokens.shape[1])
    earlier = None if distributed.count() > 1 else earlier
    done, saved = 0 if earlier is None else earlier.resume(mixers, sums), time.monotonic()
    if done:
        reporter.say(f"continuing the calibration after {done} of {len(tokens)} windows")
    batches = distributed.share(tokens[done:].split(batch))
    parts = None if row_mask is None else distributed.share(row_mask[done:].split(batch))
    cost = tokens[:batch].numel() * max((TIMES_FORWARD.get(need, 1) for need in needs), default=1)
    with collecting(runtime.model, mixers, sums, needs):
        for number, windows in enumerate(reporter.track(batches, "calibrating", len(batches), cost)):
            ids = windows.to(runtime.device, torch.long)
            if parts is not None:
                for entry in sums.values():
                    entry.row_mask = {"query": parts[number][:, 0], "key": parts[number][:, 1]}
            if BACKWARD & needs:
                _backward(runtime.model, mixers, sums, ids, needs)
            else:
                with torch.inference_mode():
                    runtime.model.base_model(input_ids=ids, use_cache=False)
            for entry in sums.values():
                entry.tokens += ids.numel()
            if number == 0 and _describe_nonfinite(mixers, sums) is not None:
                break  # the sum over processes carries it to all of them
            done += len(windows)
            if earlier is not None and done < len(tokens) and time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                earlier.save(sums, done)
                saved = time.monotonic()
    if earlier is not None:
        earlier.path.unlink(missing_ok=True)
    return sum_evidence(mixers, sums)


def draw_rows(tokens: Tensor, count: int, seed: int) -> Tensor:
    """Draw `count` of all queries and keys of windows [samples, length]: ones in zeros [samples, 2, length]."""
    rows = torch.zeros(2 * tokens.numel())
    rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]] = 1
    return rows.view(len(tokens), 2, -1)


def sum_evidence(mixers: Sequence[Mixer], sums: dict[int, Sums]) -> dict[int, Evidence]:
    """Return the evidence of all processes by layer; refuse what is not finite."""
    for entry in sums.values():
        for tensor in entry.tensors.values():
            distributed.sum_over_all(tensor)
        entry.tokens = int(distributed.sum_over_all(torch.tensor(entry.tokens, device=entry.device)))
    if (message := _describe_nonfinite(mixers, sums)) is not None:
        raise ModelError(message)
    return {layer: entry.evidence() for layer, entry in sums.items()}


@contextmanager
def collecting(model: Any, mixers: Sequence[Mixer], sums: dict[int, Sums], needs: Needs) -> Iterator[None]:
    """Add what flows through the mixers to their sums, for as long as the context is open."""

    def observe(mixer: Mixer, role: Role, x: Tensor) -> Tensor:
        if role != "key-like":
            sums[mixer.layer].add_activations(role, x)
            if "weighted" in needs:
                values = x.detach()
                x.register_hook(lambda gradient: sums[mixer.layer].add_weighted(role, values, gradient))
        return x

    def observe_input(entry: Sums, name: str, _: object, args: Any, kwargs: Any) -> None:
        entry.add_squares(name, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    with ExitStack() as stack:
        if {"gram", "moments", "weighted"} & needs:
            stack.enter_context(hooked(model, mixers, observe))
        for mixer in mixers:
            places = [("input_square", mixer.path)] * ("input" in needs)
            if mixer.value_axis is not None and "output" in needs:
                path = mixer.running_name_of(mixer.value_axis.output).removesuffix(".weight")
                places.append(("output_square", path))
            for name, path in places:
                module, hook = model.get_submodule(path), partial(observe_input, sums[mixer.layer], name)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def next_token_loss(model: Any, ids: Tensor) -> Tensor:
    """Return the mean cross entropy over windows `ids` [B, T], without the logits of all tokens at once."""
    hidden = states_before_head(model, ids)[:, :-1].flatten(0, 1)
    return distilled_loss(hidden, model.get_output_embeddings().weight, ids[:, 1:].flatten())[0]


def _backward(model: Any, mixers: Sequence[Mixer], sums: dict[int, Sums], ids: Tensor, needs: Needs) -> None:
    """Add the gradients of the summed next-token loss with respect to the projections that methods need."""
    places = [(mixer, role, slot) for mixer in mixers for role, _, slot in _differentiated(mixer, needs)]
    slots = [(mixer, slot) for mixer, _, slot in places]
    if "weighted" in needs:  # whose gradients of queries and keys need weights before them
        slots += [(mixer, slot) for mixer in mixers for slot in (mixer.query, mixer.key)]
    weights = {name: model.get_parameter(name) for name in (mixer.running_name_of(slot) for mixer, slot in slots)}
    model.requires_grad_(False)
    for weight in weights.values():
        weight.requires_grad_(True)
    loss = next_token_loss(model, ids) * ids[:, 1:].numel()
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    for mixer, role, slot in places:
        total = sums[mixer.layer].tensors[f"{role}_gradient"]
        total += mixer.by_channel(slot, gradients[mixer.running_name_of(slot)]).to(total)


def _differentiated(mixer: Mixer, needs: Needs) -> Iterator[tuple[str, Axis, Slot]]:
    """Yield the projections of a mixer whose gradients are summed, with their channels."""
    if "gradient" in needs:
        yield from (("query", mixer.axis, mixer.query), ("key", mixer.axis, mixer.key))
    if "output gradient" in needs and mixer.value_axis is not None:
        yield "output", mixer.value_axis, mixer.value_axis.output


def _describe_nonfinite(mixers: Sequence[Mixer], sums: dict[int, Sums]) -> str | None:
    """Return where the first sum lies that is not finite, or None."""
    for mixer in mixers:
        for name, tensor in sums[mixer.layer].tensors.items():
            bad = ~tensor.isfinite()
            if bool(bad.any()):
                role, _, kind = name.partition("_")
                plural = {"query": "queries", "key": "keys", "input": "inputs", "output": "outputs"}[role]
                what = "gradients" if kind in BACKWARD else plural
                head = "" if name.endswith("_square") else f", head {int(bad.nonzero()[0, 0])}"
                return f"layer {mixer.layer}{head}: NaN or infinite {what} while calibrating"
    return None
