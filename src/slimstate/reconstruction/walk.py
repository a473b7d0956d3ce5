"""Walk over the layers: cut each, train it to match the uncut layer, save it, and release its memory.

Two streams of hidden states pass through the layers, x of the uncut model and x' of the cut one, with one layer of each
model in memory. The uncut stream goes first: its states after a layer are the target of the cut layer.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slimstate.checkpoints.model_card import renamed
from slimstate.checkpoints.reader import Checkpoint, described_mixers
from slimstate.checkpoints.safetensors_io import DTYPES, Change, Replacement, StoredTensor
from slimstate.checkpoints.writer import CARD
from slimstate.core.layout import Mixer
from slimstate.data.text import Windows
from slimstate.families.contract import Config
from slimstate.models.devices import TOKENS_AT_ONCE
from slimstate.models.memory import DeviceMemory, Pieces
from slimstate.models.one_layer import OneLayerModel, Stored
from slimstate.models.options import LoadOptions
from slimstate.reconstruction.fit import Task, local_windows
from slimstate.reconstruction.options import count_held_out
from slimstate.reconstruction.rates import Rates
from slimstate.reconstruction.refit import refit
from slimstate.reconstruction.states import HiddenStates, Stream, place_for
from slimstate.reconstruction.trained_layers import TrainedLayers
from slimstate.records.parts import ReconstructionSettings
from slimstate.records.training import LayerErrors, ReconstructionRecord
from slimstate.system import distributed
from slimstate.system.errors import ModelError, quoted
from slimstate.system.progress import Reporter

REFIT_WINDOWS = 64  # of those to train on
NORM = re.compile("norm", re.IGNORECASE)  # in the name of a class
FEED_FORWARD = re.compile("(mlp|moe|moeblock|feedforward)$", re.IGNORECASE)  # ends it
# runs a mixer over all windows of this process within a context of the model, such as hooks; returns their tokens
RunMixer = Callable[[Callable[[nn.Module], AbstractContextManager[object]]], int]


@dataclass(frozen=True)
class StoredCut:
    """The cut model to reconstruct, here from files; `LayerwiseCut` cuts it layer by layer during the reconstruction.

    `checkpoint` is the model whose files are rewritten.
    """

    checkpoint: Checkpoint

    def config(self) -> Config:
        return self.checkpoint.config

    def changed(self, number: int, uncut: Mapping[str, StoredTensor], run_mixer: RunMixer) -> dict[str, Tensor]:
        """Return the tensors of a layer that differ from the uncut model.

        `run_mixer` runs the uncut mixer over the inputs of its layer in the cut model.
        """
        tensors = {name: self.checkpoint.read(name) for name in uncut}
        return {
            name: tensor
            for name, tensor in tensors.items()
            if tensor.shape != uncut[name].shape or not torch.equal(tensor, uncut[name][...])
        }

    def embedding(self, name: str) -> StoredTensor:
        return self.checkpoint.stored(name)

    def finished_config(self, windows: Windows) -> Config:
        """Return the config of the cut model, once all layers are trained."""
        return self.checkpoint.config

    def outline(self) -> Change:
        """Return the shapes of the change, before the layers are cut."""
        return Replacement({})

    def change(self) -> Change:
        """Return how tensors change that are not trained."""
        return Replacement({})

    def documents(self, record: ReconstructionRecord) -> dict[str, str]:
        """Return the texts that lie beside the weights, the model card among them."""
        path = self.checkpoint.folder / CARD
        return {CARD: renamed(path.read_text(encoding="utf-8"), record.name) if path.is_file() else ""}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of the cut model: its weights in memory, and its tensors as in the files.

    `errors` is not None where an earlier run has trained the layer.
    """

    number: int
    weights: Mapping[str, Tensor]
    stored: Mapping[str, Stored]
    errors: LayerErrors | None


class Walk:
    """A reconstruction in progress; `teacher` is the uncut model."""

    def __init__(
        self, teacher: Checkpoint, cut: StoredCut, tokens: Tensor, settings: ReconstructionSettings,
        *, run: LoadOptions, folder: TrainedLayers, reporter: Reporter,
    ) -> None:  # fmt: skip
        self.teacher, self.cut, self.settings = teacher, cut, settings
        self.folder, self.rates = folder, Rates.of(teacher, settings, reporter)
        self.device, self.precision = run.place, run.precision
        self.pieces = Pieces(DeviceMemory(self.device), TOKENS_AT_ONCE[self.device.type] // settings.length, reporter)
        self.mixers = {mixer.layer: mixer for mixer in teacher.mixers}
        self.refits = described_mixers(cut.config())[0].value_dim < teacher.mixers[0].value_dim
        numbers, held_out = torch.arange(len(tokens)), count_held_out(len(tokens))  # windows are in random order
        self.held_out, self.training = numbers[:held_out], numbers[held_out:]
        self.here = local_windows(numbers)  # the windows of this process
        weights = DTYPES[teacher.tensors[teacher.mixers[0].name_of(teacher.mixers[0].key)].dtype]
        dtype = weights if weights == self.precision else torch.float32
        self.uncut_model = OneLayerModel(teacher, teacher.config, self.device, dtype)
        self._read_ahead(0)
        self.cut_model = OneLayerModel(teacher, cut.config(), self.device, dtype)
        name = self.uncut_model.embedding_name()
        self.uncut_stream = Stream(self.uncut_model, teacher.stored(name), tokens)
        self.cut_stream = Stream(self.cut_model, cut.embedding(name), tokens)
        shape = (len(self.here), *self._first_states(self.uncut_stream, self.here[:1]).shape[1:])
        place = place_for(2 * 4 * torch.Size(shape).numel(), self.device, run.max_memory)
        for stream in (self.uncut_stream, self.cut_stream):
            stream.states = HiddenStates(shape, self.device, place, folder.path)
            self.pieces.each(self.here, partial(self._embed, stream))

    def computing(self) -> AbstractContextManager[object]:
        """Return a context in which weights in float32 compute in the requested precision."""
        return torch.autocast(self.device.type, dtype=self.precision, enabled=self.precision != torch.float32)

    def _first_states(self, stream: Stream, windows: Tensor) -> Tensor:
        with torch.no_grad(), self.computing():
            return stream.model.first_states(stream.embedded(windows))

    def _embed(self, stream: Stream, windows: Tensor) -> None:
        stream.states[windows] = self._first_states(stream, windows)

    def layers(self) -> Iterator[LayerErrors]:
        """Walk over all layers; yield the errors of every layer with a mixer, once its weights are saved."""
        for number in range(self.uncut_model.layers):
            yield from self._layer(number)  # in a frame of its own, so that its memory is released

    def _layer(self, number: int) -> Iterator[LayerErrors]:
        mixer = self.mixers.get(number)
        stored = {name: self.teacher.stored(name) for name in self.uncut_model.stored_names(self.teacher, number)}
        uncut = self.uncut_model.convert(number, stored)
        with self.uncut_model.with_weights(number, uncut):
            layer = self._cut(number, stored, uncut)
            self._read_ahead(number + 1)  # while this one is trained
            trained = () if mixer is None or layer.errors else self._trained_places(number, mixer.path)
            targets = self._mixer_outputs(mixer) if mixer is not None and trained and self.refits else ()
            added = self._advance(self.uncut_stream, number)
        self._check(added, f"layer {number} of {quoted(self.teacher.source)}")
        del uncut
        with self.cut_model.with_weights(number, layer.weights):
            if mixer is not None:
                yield layer.errors or self._reconstruct(layer, trained, added, targets)
            if number + 1 < self.uncut_model.layers:
                self._check(self._advance(self.cut_stream, number), f"layer {number} of the cut model")

    def _read_ahead(self, number: int) -> None:
        """Let the system read a layer into its cache, if there is such a layer."""
        if number < self.uncut_model.layers:
            self.teacher.read_ahead(self.uncut_model.stored_names(self.teacher, number))

    def _check(self, total: float, what: str) -> None:
        """Raise a `ModelError` where a sum over a layer is not finite."""
        if not math.isfinite(total):
            exact = self.precision == torch.float32
            way_out = "" if exact else ", or start anew with `dtype` float32 and `force`"
            raise ModelError(f"{what} gives NaN or infinite numbers: look at its weights{way_out}")

    def _cut(self, number: int, before: Mapping[str, StoredTensor], uncut: Mapping[str, Tensor]) -> Layer:
        """Return the cut layer, trained where an earlier run did; it shares the weights that did not change."""
        changed = self.pieces.run(lambda: self.cut.changed(number, before, partial(self._run_mixer, number)))
        errors, trained = self.folder.read(number) or (None, {})
        if errors is not None:
            self.rates.remember(errors)
        changed |= trained
        stored: dict[str, Stored] = {**before, **changed}
        weights = dict(uncut)
        if changed:
            weights |= self.cut_model.convert(number, stored, self.cut_model.parts_with(number, changed))
        return Layer(number=number, weights=weights, stored=stored, errors=errors)

    def _run_mixer(self, number: int, context: Callable[[nn.Module], AbstractContextManager[object]]) -> int:
        model, stream, place = self.uncut_model, self.cut_stream, self.mixers[number].path
        with torch.no_grad(), self.computing(), context(model.model):
            for piece in self.pieces.split(self.here):
                model.run_mixer(number, place, stream.states[piece], self.uncut_stream.embedded(piece))
        return len(self.here) * self.settings.length

    def _mixer_outputs(self, mixer: Mixer) -> list[Tensor]:
        """Return the outputs of the uncut mixer from the states of the cut model, for the windows of a refit."""
        outputs: list[Tensor] = []

        def observe(_: nn.Module, __: object, output: Any) -> None:
            outputs.append((output[0] if isinstance(output, tuple) else output).detach())

        with self.uncut_model.model.get_submodule(mixer.path).register_forward_hook(observe):
            self._run_refit_windows(self.uncut_model, mixer)
        return outputs

    def _run_refit_windows(self, model: OneLayerModel, mixer: Mixer) -> None:
        windows = local_windows(self.training[:REFIT_WINDOWS])
        with torch.no_grad(), self.computing():
            for piece in windows.split(1):
                states, embedded = self.cut_stream.states[piece], self.cut_stream.embedded(piece)
                model.run_mixer(mixer.layer, mixer.path, states, embedded)

    def _refit(self, mixer: Mixer, targets: Sequence[Tensor], task: Task) -> bool:
        """Refit the output projection where that lowers the error on held-out windows; return whether it does."""
        assert mixer.value_axis is not None
        name, inputs = mixer.running_name_of(mixer.value_axis.output), list[Tensor]()
        module = self.cut_model.model.get_submodule(name.removesuffix(".weight"))
        with module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach())):
            self._run_refit_windows(self.cut_model, mixer)
        cut, before = task.copy(), task.measure(task.held_out)
        fitted = refit(cut[name], zip(inputs, targets, strict=True))
        task.load({**cut, name: fitted.to(task.dtypes[name]).float()})
        if task.measure(task.held_out) < before:
            return True
        task.load(cut)
        return False

    def _reconstruct(self, layer: Layer, places: Sequence[str], added: float, targets: Sequence[Tensor]) -> LayerErrors:
        """Train the mixer and the norm before it, which lie at these places, and save them."""
        started = time.perf_counter()
        weights = dict(self._trainable(places))
        task = Task(
            weights=weights,
            dtypes={name: layer.stored[self.teacher.stored_names(name)[0]].dtype for name in weights},
            error=partial(self._errors, layer.number),
            pieces=self.pieces,
            capturable=self.uncut_stream.states.on_device,
            power=added or 1.0,
            training=self.training,
            held_out=self.held_out,
        )
        if targets:
            before, held_out = task.measure(task.training[: len(task.held_out)]), task.measure(task.held_out)
            refitted = self._refit(self.mixers[layer.number], targets, task)
            errors = self.rates.fit(task, layer.number)
            errors = replace(
                errors, before=before, held_out_before=held_out, refit=refitted,
                negligible=errors.negligible and not refitted,
            )  # fmt: skip
        else:
            errors = self.rates.fit(task, layer.number)
        self._check(errors.held_out_before, f"layer {layer.number} of the cut model")
        errors = replace(errors, seconds=time.perf_counter() - started)
        self._save(layer, errors, weights)
        return errors

    def _trained_places(self, number: int, mixer: str) -> tuple[str, ...]:
        """Return the path of the mixer, and of the norm whose output only it reads, by observing a run."""
        above, model = mixer.rpartition(".")[0], self.uncut_model.model
        siblings = {f"{above}.{name}": module for name, module in model.get_submodule(above).named_children()}
        calls: dict[str, tuple[Any, Any]] = {}  # input and output of each sibling, in the order of the calls
        with ExitStack() as stack, torch.no_grad(), self.computing():
            for place, module in siblings.items():

                def observe(_: nn.Module, args: Any, options: Any, output: Any, place: str = place) -> None:
                    calls[place] = args[0] if args else options.get("hidden_states"), output

                stack.enter_context(module.register_forward_hook(observe, with_kwargs=True))
            self.uncut_stream.forward(number, self.here[:1])
        kinds = {place: type(siblings[place]).__name__ for place in calls}
        norms = [place for place, kind in kinds.items() if NORM.search(kind)]
        inputs = [place for place in norms if calls[place][1] is calls[mixer][0]]
        others = {place for place, kind in kinds.items() if not (NORM.search(kind) or FEED_FORWARD.search(kind))}
        return (mixer, inputs[0]) if inputs and others <= {mixer} else (mixer,)

    def _errors(self, number: int, windows: Tensor) -> Iterator[Tensor]:
        for piece in self.pieces.split(windows):
            with self.computing():
                output = self.cut_stream.forward(number, piece)
            yield (output.float() - self.uncut_stream.states[piece]).square().sum()

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
        if not errors.improved:
            tensors = {name: layer.stored[name][...] for name in tensors}
        if distributed.is_main():
            self.folder.write(errors, tensors)

    def _advance(self, stream: Stream, number: int) -> float:
        """Run a stream through a layer; return the mean over windows of the squared change."""
        added = torch.zeros((), dtype=torch.float64, device=self.device)

        def advance(piece: Tensor) -> None:
            after = stream.forward(number, piece).float()
            added.add_((after - stream.states[piece]).double().square().sum())
            stream.states[piece] = after

        with torch.no_grad(), self.computing():
            self.pieces.each(self.here, advance)
        return float(distributed.sum_over_all(added)) / self.settings.samples
