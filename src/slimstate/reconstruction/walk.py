"""Walk over the layers: cut each, train it to match the uncut layer, save it, and release its memory.

Two streams of hidden states pass through the layers, x of the uncut model and x' of the cut one, with one layer of each
model in memory. The uncut stream goes first: its states after a layer are the target of the cut layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import DTYPES, StoredTensor
from slimstate.core.layout import Mixer
from slimstate.families.contract import Config
from slimstate.models.devices import TOKENS_AT_ONCE
from slimstate.models.load import check_embedded
from slimstate.models.one_layer import OneLayerModel, Stored
from slimstate.models.options import LoadOptions
from slimstate.reconstruction.fit import Task, fit
from slimstate.reconstruction.options import held_out_count
from slimstate.reconstruction.parts import trained_places
from slimstate.reconstruction.states import HiddenStates, MemoryLimits
from slimstate.reconstruction.steps import local_windows
from slimstate.reconstruction.trained_layers import TrainedLayers
from slimstate.records.training import LayerErrors, ReconstructionSettings
from slimstate.system import distributed
from slimstate.system.errors import ModelError, quoted
from slimstate.system.progress import Reporter

# runs a mixer over all windows of this process within a context of the model, such as hooks; returns their tokens
Watch = Callable[[Callable[[nn.Module], AbstractContextManager[object]]], int]


class CutModel(Protocol):
    """The cut model to reconstruct, as tensors of its files."""

    def config(self) -> Config: ...

    def changed(self, number: int, uncut: Mapping[str, StoredTensor], watch: Watch) -> dict[str, Tensor]:
        """Return the tensors of a layer that differ from the uncut model.

        `watch` runs the uncut mixer over the inputs of its layer in the cut model.
        """

    def embedding(self, name: str) -> StoredTensor: ...


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of the cut model: its weights in memory, and its tensors as in the files.

    `errors` is not None where an earlier run has trained the layer.
    """

    number: int
    mixer: Mixer | None
    weights: Mapping[str, Tensor]
    stored: Mapping[str, Stored]
    errors: LayerErrors | None


class Walk:
    """A reconstruction in progress; `teacher` is the uncut model."""

    def __init__(
        self, teacher: Checkpoint, cut: CutModel, tokens: Tensor, settings: ReconstructionSettings,
        *, run: LoadOptions, folder: TrainedLayers, reporter: Reporter,
    ) -> None:  # fmt: skip
        self.teacher, self.cut, self.settings = teacher, cut, settings
        self.folder, self.reporter = folder, reporter
        self.device, self.precision = run.place, run.precision
        self.mixers = {mixer.layer: mixer for mixer in teacher.mixers}
        self.held_out, self.training = _split(len(tokens))
        weights = DTYPES[teacher.tensors[teacher.mixers[0].name_of(teacher.mixers[0].key)].dtype]
        dtype = torch.float32 if self.precision == torch.float32 else weights
        self.uncut_model = OneLayerModel(teacher, teacher.config, self.device, dtype)
        self.cut_model = OneLayerModel(teacher, cut.config(), self.device, dtype)
        name = self.uncut_model.embedding_name()
        embeddings = (
            Embedding.of(self.uncut_model, teacher.stored(name), tokens),
            Embedding.of(self.cut_model, cut.embedding(name), tokens),
        )
        self.uncut_stream, self.cut_stream = self._streams(
            embeddings, MemoryLimits.of(self.device, run.max_memory), folder.path
        )

    @property
    def windows(self) -> int:
        return len(self.held_out) + len(self.training)

    @cached_property
    def here(self) -> Tensor:
        """Windows of this process."""
        return local_windows(torch.arange(self.windows))

    def pieces(self, windows: Tensor) -> Iterator[Tensor]:
        """Yield as many windows of this process as run at once."""
        at_once = max(1, TOKENS_AT_ONCE[self.device.type] // self.settings.length)
        return iter(windows.split(at_once)) if len(windows) else iter(())

    def computing(self) -> AbstractContextManager[object]:
        """Return a context in which weights in float32 compute in the requested precision."""
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)

    def _streams(
        self, embeddings: tuple[Embedding, Embedding], limits: MemoryLimits, folder: Path
    ) -> tuple[Stream, Stream]:
        """Return the streams of both models before the first layer."""
        models, states = (self.uncut_model, self.cut_model), list[HiddenStates]()
        with torch.no_grad(), self.computing():
            for piece in self.pieces(self.here):
                first = [
                    model.first_states(each.of_windows(piece)) for model, each in zip(models, embeddings, strict=True)
                ]
                if not states:
                    shape = (len(self.here), *first[0].shape[1:])
                    place = limits.place(2 * 4 * torch.Size(shape).numel())
                    states = [HiddenStates(shape, limits.device, place, folder) for _ in range(2)]
                states[0][_local(piece)], states[1][_local(piece)] = first
        uncut, cut = (Stream(*each) for each in zip(models, embeddings, states, strict=True))
        return uncut, cut

    def layers(self) -> Iterator[LayerErrors]:
        """Walk over all layers; yield the errors of every layer with a mixer, once its weights are saved."""
        for number in range(self.uncut_model.layers):
            yield from self._layer(number)  # in a frame of its own, so that its memory is released

    def _layer(self, number: int) -> Iterator[LayerErrors]:
        stored = {name: self.teacher.stored(name) for name in self.uncut_model.stored_names(self.teacher, number)}
        uncut = self.uncut_model.convert(number, stored)
        with self.uncut_model.holding(number, uncut):
            layer = self._cut(number, stored, uncut)
            self._prefetch(number + 1)
            trained = () if layer.mixer is None or layer.errors else self._trained_places(number, layer.mixer)
            added = self._advance(self.uncut_stream, number)
        self._check(added, f"layer {number} of {quoted(self.teacher.source)}")
        del uncut
        with self.cut_model.holding(number, layer.weights):
            if layer.mixer is not None:
                yield layer.errors or self._reconstruct(layer, trained, added)
            if number + 1 < self.uncut_model.layers:
                self._check(self._advance(self.cut_stream, number), f"layer {number} of the cut model")

    def _check(self, measured: float, what: str) -> None:
        """Raise a `ModelError` where a sum over a layer is not finite."""
        if not math.isfinite(measured):
            exact = self.precision == torch.float32
            way_out = "" if exact else ", or start anew with `dtype` float32 and `force`"
            raise ModelError(f"{what} gives NaN or infinite numbers: look at its weights{way_out}")

    def _cut(self, number: int, before: Mapping[str, StoredTensor], uncut: Mapping[str, Tensor]) -> Layer:
        """Return the cut layer, trained where an earlier run did; it shares the weights that did not change."""
        changed = self.cut.changed(number, before, partial(self._watch, number))
        errors, trained = self.folder.read(number) or (None, {})
        changed |= trained
        stored: dict[str, Stored] = {**before, **changed}
        weights = dict(uncut)
        if changed:
            weights |= self.cut_model.convert(number, stored, self.cut_model.parts_with(number, changed))
        return Layer(number=number, mixer=self.mixers.get(number), weights=weights, stored=stored, errors=errors)

    def _watch(self, number: int, watching: Callable[[nn.Module], AbstractContextManager[object]]) -> int:
        model, stream, place = self.uncut_model, self.cut_stream, self.mixers[number].path
        with torch.no_grad(), self.computing(), watching(model.model):
            for piece in self.pieces(self.here):
                embedded = self.uncut_stream.embedding.of_windows(piece)
                model.run_mixer(number, place, stream.states[_local(piece)], embedded)
        return len(self.here) * self.settings.length

    def _prefetch(self, number: int) -> None:
        """Let the system read the next layer from disk while this one is trained."""
        if number < self.uncut_model.layers:
            self.teacher.expect(self.uncut_model.stored_names(self.teacher, number))

    def _reconstruct(self, layer: Layer, places: Sequence[str], added: float) -> LayerErrors:
        """Train the mixer and the norm before it, which lie at these places, and save them."""
        started = time.perf_counter()
        weights = dict(self._trainable(places))
        task = Task(
            weights=weights,
            dtypes={name: layer.stored[self.teacher.stored_names(name)[0]].dtype for name in weights},
            error=partial(self._errors, layer.number),
            recordable=self.uncut_stream.states.on_device,
            power=added or 1.0,
            training=self.training,
            held_out=self.held_out,
        )
        with self.reporter.meter(f"layer {layer.number}", self.settings.steps) as meter:
            errors = fit(task, self.settings, layer.number, lambda step, loss: meter(step, f"error {loss:.4f}"))
        self._check(errors.held_out_before, f"layer {layer.number} of the cut model")
        errors = replace(errors, seconds=time.perf_counter() - started)
        self._save(layer, errors, weights)
        return errors

    def _trained_places(self, number: int, mixer: Mixer) -> tuple[str, ...]:
        """Find what to train in a run over one window."""
        piece = torch.tensor([int(self.here[0])])
        with torch.no_grad(), self.computing():
            return trained_places(self.uncut_model.model, mixer.path, lambda: self.uncut_stream.forward(number, piece))

    def _errors(self, number: int, windows: Tensor) -> Iterator[Tensor]:
        for piece in self.pieces(windows):
            with self.computing():
                output = self.cut_stream.forward(number, piece)
            yield (output.float() - self.uncut_stream.states[_local(piece)]).square().sum()

    def _trainable(self, places: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of mixer and norm by name, after replacing them by copies in float32."""
        for place in places:
            for name, weight in list(self.cut_model.model.get_submodule(place).named_parameters(prefix=place)):
                if not self.teacher.stored_names(name) or not weight.is_floating_point():
                    continue
                owner, _, leaf = name.rpartition(".")
                fresh = nn.Parameter(weight.detach().float().clone(), requires_grad=True)
                setattr(self.cut_model.model.get_submodule(owner), leaf, fresh)
                yield name, fresh

    def _save(self, layer: Layer, errors: LayerErrors, weights: Mapping[str, nn.Parameter]) -> None:
        """Save the weights as the files will have them; those of the cut where training did not improve them."""
        tensors: dict[str, Tensor] = {}
        for name, weight in weights.items():
            weight.requires_grad_(False)
            stored = self.teacher.stored_names(name)
            sizes = [layer.stored[part].shape[0] for part in stored]
            pieces = weight.split(sizes) if len(stored) > 1 else (weight,)
            for part, values in zip(stored, pieces, strict=True):
                tensors[part] = values.to(layer.stored[part].dtype).view(layer.stored[part].shape)
        if not errors.step:
            tensors = {name: layer.stored[name][...] for name in tensors}
        if distributed.is_main():
            self.folder.write(errors, tensors)

    def _advance(self, stream: Stream, number: int) -> float:
        """Run a stream through a layer; return the mean over windows of the squared change."""
        added = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad(), self.computing():
            for piece in self.pieces(self.here):
                before, after = stream.states[_local(piece)], stream.forward(number, piece).float()
                added += (after - before).double().square().sum()
                stream.states[_local(piece)] = after
        return float(distributed.sum_over_all(added)) / self.windows


@dataclass(frozen=True)
class Stream:
    """A model and its hidden states before the current layer."""

    model: OneLayerModel
    embedding: Embedding
    states: HiddenStates

    def forward(self, layer: int, windows: Tensor) -> Tensor:
        """Return the output of a layer for these windows."""
        return self.model.forward(layer, self.states[_local(windows)], self.embedding.of_windows(windows))


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """The embedding of each distinct token, and the places of the tokens."""

    rows: Tensor
    places: Tensor

    @classmethod
    def of(cls, model: OneLayerModel, weight: StoredTensor, tokens: Tensor) -> Embedding:
        check_embedded(tokens, weight.shape[0])
        known, places = tokens.long().unique(return_inverse=True)
        rows = model.embed(weight.rows(known))
        return cls(rows=rows, places=places.to(rows.device))

    def of_windows(self, windows: Tensor) -> Tensor:
        return self.rows[self.places[windows.to(self.rows.device)]]


def _local(windows: Tensor) -> Tensor:
    """Return the indices of windows in the hidden states of this process."""
    return windows // distributed.count()


def _split(windows: int) -> tuple[Tensor, Tensor]:
    """Return the held-out windows and the others; windows are in random order."""
    held_out, numbers = held_out_count(windows), torch.arange(windows)
    return numbers[:held_out], numbers[held_out:]
