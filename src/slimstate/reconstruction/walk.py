"""The walk over the layers: each is cut, trained to give what the uncut one gave, kept, and forgotten.

Two streams of hidden states go along, x of the uncut model and x' of the cut one, and one layer of each is in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import DTYPES
from slimstate.core.layout import Mixer
from slimstate.families.contract import Config
from slimstate.models.devices import TOKENS_AT_ONCE
from slimstate.models.offload import LoadOptions
from slimstate.models.one_layer import OneLayerModel
from slimstate.reconstruction.fit import Task, fit, held_here
from slimstate.reconstruction.options import HELD_OUT
from slimstate.reconstruction.parts import Parts, find_parts
from slimstate.reconstruction.run_folder import RunFolder
from slimstate.reconstruction.states import HiddenStates, Room
from slimstate.records.reconstruction import LayerErrors, ReconstructionSettings
from slimstate.system import distributed
from slimstate.system.progress import Reporter

# run a layer over all windows, inside of what is made for the model, such as hooks
Watch = Callable[[Callable[[nn.Module], AbstractContextManager[object]]], None]


class CutModel(Protocol):
    """The cut model that is reconstructed, as tensors that its files have or will have."""

    def config(self) -> Config: ...

    def layer(self, number: int, uncut: Mapping[str, Tensor], watch: Watch) -> Mapping[str, Tensor]:
        """The tensors of a layer, from those of the uncut one; what is the same is the same object.

        `watch` runs the uncut layer over what enters it in the cut model.
        """

    def embedding(self, name: str) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of the cut model while it is in memory: its weights, and its tensors as the files have them."""

    number: int
    mixer: Mixer | None
    weights: Mapping[str, Tensor]
    stored: Mapping[str, Tensor]


class Walk:
    """A reconstruction under way; `teacher` is the uncut model."""

    def __init__(
        self, teacher: Checkpoint, cut: CutModel, tokens: Tensor, settings: ReconstructionSettings,
        *, run: LoadOptions, folder: RunFolder, reporter: Reporter,
    ) -> None:  # fmt: skip
        self.teacher, self.cut, self.settings = teacher, cut, settings
        self.folder, self.reporter = folder, reporter
        self.device, self.precision = run.place, run.precision
        self.mixers = {mixer.layer: mixer for mixer in teacher.mixers}
        self.held_out, self.training = _split(len(tokens))
        weights = DTYPES[teacher.tensors[teacher.mixers[0].name_of(teacher.mixers[0].key)].dtype]
        self.kept_in = torch.float32 if self.precision == torch.float32 else weights
        self.uncut_model = OneLayerModel(teacher, teacher.config, self.device, self.kept_in)
        self.cut_model = OneLayerModel(teacher, cut.config(), self.device, self.kept_in)
        name = self.uncut_model.embedding_name()
        self.embedding = Embedding.of(self.uncut_model, teacher.read(name), tokens)
        self.cut_embedding = Embedding.of(self.cut_model, cut.embedding(name), tokens)
        self.streams = self._first_states(Room.of(self.device, run.max_memory), folder.path)

    @property
    def windows(self) -> int:
        return len(self.held_out) + len(self.training)

    @cached_property
    def here(self) -> Tensor:
        """The windows of this process."""
        return held_here(torch.arange(self.windows))

    def pieces(self, windows: Tensor) -> Iterator[Tensor]:
        """As many windows of this process as are run at once."""
        at_once = max(1, TOKENS_AT_ONCE[self.device.type] // self.settings.length)
        return iter(windows.split(at_once)) if len(windows) else iter(())

    def computing(self) -> AbstractContextManager[object]:
        """Weights in float32 are computed with in the precision that was asked for."""
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)

    def _first_states(self, room: Room, folder: Path) -> Streams:
        streams: Streams | None = None
        with torch.no_grad(), self.computing():
            for piece in self.pieces(self.here):
                states = [
                    model.first_states(embedding.of_windows(piece))
                    for model, embedding in ((self.uncut_model, self.embedding), (self.cut_model, self.cut_embedding))
                ]
                if streams is None:
                    streams = Streams.empty((len(self.here), *states[0].shape[1:]), room, folder)
                streams.uncut[_local(piece)], streams.cut[_local(piece)] = states
        assert streams is not None
        return streams

    def layers(self) -> Iterator[LayerErrors]:
        """Walk; gives the errors of every layer that has a mixer, once its weights are kept."""
        for number in range(self.uncut_model.layers):
            before = {name: self.teacher.read(name) for name in self.uncut_model.stored_names(self.teacher, number)}
            uncut = self.uncut_model.converted(number, before)
            with self.uncut_model.holding(number, uncut):
                layer = self._cut(number, before, uncut)
                del before, uncut
                self._expect(number + 1)
                with self.cut_model.holding(number, layer.weights):
                    if layer.mixer is not None:
                        yield self._reconstruct(layer, layer.mixer)
                    if number + 1 < self.uncut_model.layers:
                        self._advance(number)

    def _cut(self, number: int, before: Mapping[str, Tensor], uncut: Mapping[str, Tensor]) -> Layer:
        """The cut layer, as an earlier run left it where there was one; it shares all weights that did not change."""
        mixer, found = self.mixers.get(number), self.folder.found(number)
        stored = dict(self.cut.layer(number, before, partial(self._watch, number)))
        stored |= {} if found is None else found[1]
        changed = [name for name, tensor in stored.items() if tensor is not before.get(name)]
        inside = None if mixer is None else f"{mixer.place_in_files}."
        weights = uncut
        if mixer is not None and inside is not None and all(name.startswith(inside) for name in changed):
            own = {name: tensor for name, tensor in stored.items() if name.startswith(inside)}
            weights = {**uncut, **self.cut_model.converted(number, own, part=mixer.path)}
        elif changed:
            weights = self.cut_model.converted(number, stored)
        return Layer(number=number, mixer=mixer, weights=weights, stored=stored)

    def _watch(self, number: int, watching: Callable[[nn.Module], AbstractContextManager[object]]) -> None:
        with torch.no_grad(), self.computing(), watching(self.uncut_model.model):
            for piece in self.pieces(self.here):
                states = self.streams.cut[_local(piece)]
                self.uncut_model.run(number, states, self.embedding.of_windows(piece))

    def _expect(self, number: int) -> None:
        """Have the system read the next layer from the disk while this one is trained."""
        if number < self.uncut_model.layers:
            self.teacher.expect(self.uncut_model.stored_names(self.teacher, number))

    def _reconstruct(self, layer: Layer, mixer: Mixer) -> LayerErrors:
        """Train the mixer of a layer and the norm before it, or take what an earlier run made of them."""
        found = self.folder.found(layer.number)
        if found is not None:
            return found[0]
        started = time.perf_counter()
        parts = self._parts(layer, mixer)
        power = self._targets(layer.number, parts)
        weights = dict(self._trainable(layer, parts))
        task = Task(
            weights=weights,
            dtypes={name: layer.stored[self.teacher.stored_names(name)[0]].dtype for name in weights},
            error=lambda windows: self._errors(layer.number, parts, windows),
            power=power,
            training=self.training,
            held_out=self.held_out,
        )
        label = f"layer {layer.number + 1} of {self.uncut_model.layers}"
        with parts.behind_mixer(self.cut_model.model), self.reporter.meter(label, self.settings.steps) as meter:
            errors = fit(task, self.settings, layer.number, lambda step, loss: meter(step, f"error {loss:.4f}"))
        errors = replace(errors, seconds=time.perf_counter() - started)
        self._keep(layer, errors, weights)
        return errors

    def _parts(self, layer: Layer, mixer: Mixer) -> Parts:
        """By a run over the first window that there is."""
        piece = torch.tensor([int(self.here[0])])
        with torch.no_grad(), self.computing():
            states, embedded = self.streams.uncut[_local(piece)], self.embedding.of_windows(piece)
            return find_parts(
                self.uncut_model.model, mixer.path, lambda: self.uncut_model.run(layer.number, states, embedded)
            )

    def _targets(self, number: int, parts: Parts) -> float:
        """What the uncut layer gives behind its mixer; returns what the mixer adds, squared, summed over a window."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad(), self.computing(), parts.behind_mixer(self.uncut_model.model):
            for piece in self.pieces(self.here):
                states = self.streams.uncut[_local(piece)]
                target = self.uncut_model.run(number, states, self.embedding.of_windows(piece))
                self.streams.targets[_local(piece)] = target
                total += (target.float() - states).double().square().sum()
        return float(distributed.sum_over_all(total)) / self.windows or 1.0

    def _errors(self, number: int, parts: Parts, windows: Tensor) -> Iterator[Tensor]:
        for piece in self.pieces(windows):
            with self.computing():
                states = self.streams.cut[_local(piece)]
                given = self.cut_model.run(number, states, self.cut_embedding.of_windows(piece))
            yield (given.float() - self.streams.targets[_local(piece)]).square().sum()

    def _trainable(self, layer: Layer, parts: Parts) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of mixer and norm that the files have, in float32, in their places in the cut model."""
        for place in parts.trained:
            for name, weight in list(self.cut_model.model.get_submodule(place).named_parameters(prefix=place)):
                stored = self.teacher.stored_names(name)
                if not stored or not weight.is_floating_point():
                    continue
                owner, _, leaf = name.rpartition(".")
                fresh = nn.Parameter(weight.detach().float().clone(), requires_grad=True)
                setattr(self.cut_model.model.get_submodule(owner), leaf, fresh)
                yield name, fresh

    def _keep(self, layer: Layer, errors: LayerErrors, weights: Mapping[str, nn.Parameter]) -> None:
        """The weights as the files have them; those of the cut where they were kept."""
        found: dict[str, Tensor] = {}
        for name, weight in weights.items():
            weight.requires_grad_(False)
            stored = self.teacher.stored_names(name)
            sizes = [layer.stored[part].shape[0] for part in stored]
            for part, values in zip(
                stored, weight.detach().split(sizes) if len(stored) > 1 else (weight,), strict=True
            ):
                found[part] = values.detach().to(layer.stored[part].dtype).view(layer.stored[part].shape)
        if not errors.step:
            found = {name: layer.stored[name] for name in found}
        if distributed.is_main():
            self.folder.keep(errors, found)

    def _advance(self, number: int) -> None:
        """Both streams through the whole layer."""
        with torch.no_grad(), self.computing():
            for piece in self.pieces(self.here):
                place = _local(piece)
                for model, states, embedding in (
                    (self.uncut_model, self.streams.uncut, self.embedding),
                    (self.cut_model, self.streams.cut, self.cut_embedding),
                ):
                    states[place] = model.run(number, states[place], embedding.of_windows(piece))


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The hidden states that enter a layer in the uncut and in the cut model, and the targets behind its mixer."""

    uncut: HiddenStates
    cut: HiddenStates
    targets: HiddenStates

    @classmethod
    def empty(cls, shape: tuple[int, ...], room: Room, folder: Path) -> Streams:
        place = room.place(3 * 4 * torch.Size(shape).numel())
        uncut, cut, targets = (HiddenStates(shape, room.device, place, folder) for _ in range(3))
        return cls(uncut=uncut, cut=cut, targets=targets)


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """What the embedding makes of each token that there is, and which of them stand where."""

    rows: Tensor
    places: Tensor

    @classmethod
    def of(cls, model: OneLayerModel, weight: Tensor, tokens: Tensor) -> Embedding:
        known, places = tokens.long().unique(return_inverse=True)
        return cls(rows=model.embedded(weight, known), places=places)

    def of_windows(self, windows: Tensor) -> Tensor:
        return self.rows[self.places[windows].to(self.rows.device)]


def _local(windows: Tensor) -> Tensor:
    """The numbers that windows of this process have in its hidden states."""
    return windows // distributed.count()


def _split(windows: int) -> tuple[Tensor, Tensor]:
    """A tenth of the windows, which were drawn at random, is held out."""
    held_out = max(1, round(HELD_OUT * windows))
    numbers = torch.arange(windows)
    return numbers[:held_out], numbers[held_out:]
