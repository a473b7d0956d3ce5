"""Run one layer of a stock model at a time, with the weights of that layer only: for models of any size.

The stock class itself runs, so that every layer gets the masks, rotary embeddings and multipliers that its model passes
to it. The layers before the one of interest pass their input on, and the run ends after it.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import StoredTensor
from slimstate.families import Config, family_of
from slimstate.models.compact_weights import CompactWeight
from slimstate.models.prepare import prepare
from slimstate.models.stock import quiet_transformers, refusals, stock_model
from slimstate.system.errors import ModelError

Stored = Tensor | StoredTensor
HALF = ({torch.bfloat16}, {torch.float16})  # float32 has every value of these


class _EndOfRun(Exception):  # noqa: N818 - leaves a run, and is no error
    """The end of a run; its argument is the output of the layer, what would enter it, or nothing."""


class OneLayerModel:
    """The stock model of a config with no weights but those that `with_weights` gives to one of its layers."""

    def __init__(self, checkpoint: Checkpoint, config: Config, device: torch.device, dtype: torch.dtype) -> None:
        """Build the model of a config, whose layers are named as in the checkpoint; `dtype` is that of its weights."""
        from accelerate import init_empty_weights

        self._device, self._dtype = device, dtype
        self._roots = checkpoint.roots
        prepare(family_of(config).model_type)
        with init_empty_weights(include_buffers=False):
            self.model = stock_model(config, device, dtype).eval()
        self.model.requires_grad_(False)
        self._mixers = tuple(f"{mixer.path}." for mixer in checkpoint.mixers)
        running = checkpoint.mixers[0].path.split(".")
        self._layers_path = ".".join(running[: next(n for n, part in enumerate(running) if part.isdigit())])
        self._current = 0
        self._states: Tensor | None = None
        self._other_outputs: list[Any] | None = None
        layers = self.model.get_submodule(self._layers_path)
        self.layers = len(layers)
        for number, layer in enumerate(layers):
            layer.forward = partial(self._enter, number, layer.forward)

    def path_of(self, layer: int) -> str:
        """Return the path of a layer in the running model, such as "model.layers.0"."""
        return f"{self._layers_path}.{layer}"

    def stored_names(self, checkpoint: Checkpoint, layer: int) -> list[str]:
        """Return the tensors in the files that make up a layer, with those that it shares with other layers."""
        layers = {layer, *self._shared_with(layer)}
        prefixes = tuple(f"{self._stored(self.path_of(number))}." for number in layers)
        return [name for name in checkpoint.tensors if name.startswith(prefixes)]

    def _shared_with(self, layer: int) -> set[int]:
        own = f"{self.path_of(layer)}."
        sources = {source for name, source in self.model.all_tied_weights_keys.items() if name.startswith(own)}
        return {int(source.removeprefix(f"{self._layers_path}.").split(".")[0]) for source in sources}

    def _stored(self, name: str) -> str:
        running, stored = self._roots
        return stored + name.removeprefix(running) if name.startswith(running) else name

    def _running(self, name: str) -> str:
        running, stored = self._roots
        return running + name.removeprefix(stored) if name.startswith(stored) else name

    def parts_with(self, layer: int, names: Iterable[str]) -> tuple[str, ...]:
        """Return the children of a layer that have these tensors of the files; none if all of the layer is needed."""
        path = self.path_of(layer)
        children = {f"{path}.{name}" for name, _ in self.model.get_submodule(path).named_children()}
        parts = {".".join(self._running(name).split(".")[: path.count(".") + 2]) for name in names}
        return tuple(sorted(parts)) if parts <= children else ()

    def convert(self, layer: int, stored: Mapping[str, Stored], parts: Sequence[str] = ()) -> dict[str, Tensor]:
        """Return the weights of a layer, or of parts of it, as the running model names and joins them.

        Tensors in files are read when they are needed. Experts stay in the dtype of the files where they would take
        more memory otherwise.
        """
        own = tuple(f"{path}." for path in parts or [self.path_of(layer)])
        paths = list(parts) or [self.path_of(number) for number in (layer, *self._shared_with(layer))]
        tensors = {self._running(name): tensor for name, tensor in stored.items()}
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(own) or not parts}
        compact = self._compact_experts(paths, tensors)
        weights: dict[str, Tensor] = {}
        for path, dtype in compact.items():
            experts = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{path}.")}
            loaded = self._load(layer, experts, [path], dtype)
            weights |= {name: CompactWeight(weight) for name, weight in loaded.items()}
        weights |= self._load(layer, tensors, paths, self._dtype, without=compact)
        return {name: tensor for name, tensor in weights.items() if name.startswith(own)}

    def _compact_experts(self, paths: Sequence[str], stored: Mapping[str, Stored]) -> dict[str, torch.dtype]:
        """Return the modules below these paths with weights of many experts, and the half precision of their files."""
        if self._dtype != torch.float32 or self._device.type != "cpu":
            return {}
        experts = {}
        for name, module in self.model.named_modules():
            if name.startswith(tuple(f"{path}." for path in paths)) and not name.startswith(self._mixers):
                dtypes = {tensor.dtype for stem, tensor in stored.items() if stem.startswith(f"{name}.")}
                if dtypes in HALF and any(weight.dim() == 3 for weight in module.parameters(recurse=False)):
                    experts[name] = dtypes.pop()
        return experts

    def _load(
        self, layer: int, stored: Mapping[str, Stored], paths: list[str], dtype: torch.dtype,
        *, without: Iterable[str] = (),
    ) -> dict[str, Tensor]:  # fmt: skip
        """Load what is below these paths of the model, as the stock class would load it in the whole model."""
        stock = type(self.model)

        class Part(stock):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                for path in without:
                    owner, _, name = path.rpartition(".")
                    setattr(self.get_submodule(owner), name, nn.Module())
                _keep_only(self, paths)

        Part.__name__ = stock.__name__
        quiet_transformers()
        # the stock class reads a tensor when it is needed, not all of them in threads at the start
        with refusals(), mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"):
            model, report = Part.from_pretrained(
                None, config=self.model.config, state_dict=dict(stored), dtype=dtype, output_loading_info=True
            )
        if wrong := [*report["missing_keys"], *report["mismatched_keys"]]:
            raise ModelError(f"the stock class does not load {len(wrong)} tensors of layer {layer}, such as {wrong[0]}")
        return model.state_dict()

    @contextmanager
    def with_weights(self, layer: int, weights: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """Give a layer these weights while this is open, by their names in the running model."""
        path = self.path_of(layer)
        module = self.model.get_submodule(path)
        on_device = {name.removeprefix(f"{path}."): tensor.to(self._device) for name, tensor in weights.items()}
        module.load_state_dict(on_device, assign=True)
        module.requires_grad_(False)
        try:
            yield module
        finally:
            for owner in module.modules():
                for name, weight in owner.named_parameters(recurse=False):
                    empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                    setattr(owner, name, nn.Parameter(empty, requires_grad=False))

    def first_states(self, embedded: Tensor) -> Tensor:
        """Return what enters the first layer, from the output of the embedding."""
        return self.forward(-1, None, embedded)

    def run_mixer(self, layer: int, mixer: str, states: Tensor, embedded: Tensor) -> None:
        """Run a layer up to the end of its mixer, whose path this is, for hooks on the mixer."""

        def leave(*_: object) -> None:
            raise _EndOfRun(None)

        with self.model.get_submodule(mixer).register_forward_hook(leave):
            self.forward(layer, states, embedded)

    def forward(self, layer: int, states: Tensor | None, embedded: Tensor) -> Tensor:
        """Return the output of a layer for the hidden states that enter it."""
        self._current, self._states = layer, states
        try:
            self.model.base_model(inputs_embeds=embedded, use_cache=False)
        except _EndOfRun as end:
            (output,) = end.args
        else:
            raise AssertionError(f"the model ran past layer {layer}")
        finally:
            self._states = None
        if isinstance(output, tuple):
            if any(isinstance(value, Tensor) for value in tree_leaves(output[1:])):
                raise ModelError(
                    "the layers of this model pass on more than hidden states, such as attention residuals, so that it"
                    " cannot be reconstructed layer by layer: train it with `recover`"
                )
            output, *self._other_outputs = output
        return output

    def _enter(self, number: int, forward: Any, *args: Any, **options: Any) -> Any:
        """Run in place of the forward of every layer."""
        hidden = args[0] if args else options["hidden_states"]
        if self._current < 0:
            raise _EndOfRun(hidden)
        if number < self._current:
            return hidden if self._other_outputs is None else (hidden, *self._other_outputs)
        if args:
            args = (self._states, *args[1:])
        else:
            options["hidden_states"] = self._states
        raise _EndOfRun(forward(*args, **options))

    def embedding_name(self) -> str:
        """Return the name of the embedding's weight in the files."""
        embedding = self.model.get_input_embeddings()
        path = next(name for name, module in self.model.named_modules() if module is embedding)
        return f"{self._stored(path)}.weight"

    def embed(self, rows: Tensor) -> Tensor:
        """Return the output of the embedding for the tokens whose rows of its weight these are."""
        module = self.model.get_input_embeddings()
        weight, padding = module.weight, module.padding_idx
        module.weight, module.padding_idx = nn.Parameter(rows.to(self._dtype), requires_grad=False), None
        try:
            with torch.no_grad():
                return module(torch.arange(len(rows))).to(self._device)
        finally:
            module.weight, module.padding_idx = weight, padding


def _keep_only(model: Any, paths: list[str]) -> None:
    """Remove everything from a model but the modules at these paths and their parents."""
    _remove_others(model, paths, "")
    names = set(dict(model.named_parameters()))
    for owner in (model, model.base_model):
        tied = owner.all_tied_weights_keys.items()
        owner.all_tied_weights_keys = {name: source for name, source in tied if {name, source} <= names}


def _remove_others(parent: nn.Module, paths: list[str], prefix: str) -> None:
    """Remove the parameters of a parent of these paths, and replace other children by empty modules."""
    parent._parameters.clear()
    for name, child in list(parent.named_children()):
        path = f"{prefix}{name}"
        if any(other.startswith(f"{path}.") for other in paths):
            _remove_others(child, paths, f"{path}.")
        elif path not in paths:
            setattr(parent, name, nn.Module())
