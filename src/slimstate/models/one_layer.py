"""A stock model of which one layer at a time has weights: for models of any size, layer after layer.

The stock class itself runs, so that every layer gets the masks, rotary embeddings and multipliers that the model gives
it. The layers before the one that is wanted pass hidden states on, and the run ends behind it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import StoredTensor
from slimstate.families import family_of
from slimstate.families.contract import Config
from slimstate.models.prepare import prepare
from slimstate.models.resting import Resting
from slimstate.models.stock import quiet_transformers, refusals, stock_model
from slimstate.system.errors import ModelError

Stored = Tensor | StoredTensor
NARROWER = ({torch.bfloat16}, {torch.float16})  # than float32, with no value that it does not have


class _Behind(Exception):  # noqa: N818 - the way out of a run, and no error
    """The run has come to where it ends: with what the layer gave, what would enter it, or nothing."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class OneLayerModel:
    """The stock model of a config, without weights but those that `holding` gives to one of its layers."""

    def __init__(self, checkpoint: Checkpoint, config: Config, device: torch.device, dtype: torch.dtype) -> None:
        """Of a config that names its layers as the checkpoint does; weights are kept in `dtype`."""
        self._device, self._dtype = device, dtype
        self._roots = checkpoint.roots
        prepare(family_of(config).model_type)
        with _default_dtype(dtype), _parameters_without_memory():
            self.model = stock_model(config, device).eval()
        self.model.requires_grad_(False)
        self._mixers = tuple(f"{mixer.path}." for mixer in checkpoint.mixers)
        running = checkpoint.mixers[0].path.split(".")
        self._list = ".".join(running[: next(place for place, part in enumerate(running) if part.isdigit())])
        self._current = 0
        self._given: Tensor | None = None
        self._beside: tuple[Any, ...] | None = None
        layers = self.model.get_submodule(self._list)
        self.layers = len(layers)
        for number, layer in enumerate(layers):
            layer.forward = partial(self._enter, number, layer.forward)

    def place_of(self, layer: int) -> str:
        """The layer in the running model: "model.layers.0"."""
        return f"{self._list}.{layer}"

    def stored_names(self, checkpoint: Checkpoint, layer: int) -> list[str]:
        """The tensors in the files that make up a layer, those of others that it shares among them."""
        wanted = {layer, *self._shared_with(layer)}
        prefixes = tuple(f"{self._stored(self.place_of(number))}." for number in wanted)
        return [name for name in checkpoint.tensors if name.startswith(prefixes)]

    def _shared_with(self, layer: int) -> set[int]:
        """Layers whose weights are this one's, too."""
        own, tied = f"{self.place_of(layer)}.", getattr(self.model, "all_tied_weights_keys", None) or {}
        sources = {source for name, source in tied.items() if name.startswith(own)}
        return {int(source.removeprefix(f"{self._list}.").split(".")[0]) for source in sources}

    def _stored(self, name: str) -> str:
        running, stored = self._roots
        return stored + name.removeprefix(running) if name.startswith(running) else name

    def _running(self, name: str) -> str:
        running, stored = self._roots
        return running + name.removeprefix(stored) if name.startswith(stored) else name

    def parts_with(self, layer: int, names: Iterable[str]) -> tuple[str, ...]:
        """The places right below a layer that hold these tensors of the files; none where it takes the whole layer."""
        place = self.place_of(layer)
        known = {f"{place}.{name}" for name, _ in self.model.get_submodule(place).named_children()}
        found = {".".join(self._running(name).split(".")[: place.count(".") + 2]) for name in names}
        return tuple(sorted(found)) if found <= known else ()

    def converted(self, layer: int, stored: Mapping[str, Stored], parts: Sequence[str] = ()) -> dict[str, Tensor]:
        """The tensors of a layer, or of parts of it by their places, as the running model names, joins and keeps them.

        Tensors that are still in their files are read when their turn comes. Experts rest as the files have them where
        they would take more memory otherwise.
        """
        own = tuple(f"{place}." for place in parts or [self.place_of(layer)])
        places = list(parts) or [self.place_of(number) for number in (layer, *self._shared_with(layer))]
        wanted = {self._running(name): tensor for name, tensor in stored.items()}
        wanted = {name: tensor for name, tensor in wanted.items() if name.startswith(own) or not parts}
        resting = self._resting(places, wanted)
        found: dict[str, Tensor] = {}
        for place, dtype in resting.items():
            experts = {name: wanted.pop(name) for name in list(wanted) if name.startswith(f"{place}.")}
            found |= {name: Resting(weight) for name, weight in self._loaded(layer, experts, [place], dtype).items()}
        found |= self._loaded(layer, wanted, places, self._dtype, without=resting)
        return {name: tensor for name, tensor in found.items() if name.startswith(own)}

    def _resting(self, places: Sequence[str], stored: Mapping[str, Stored]) -> dict[str, torch.dtype]:
        """Modules in these places that hold weights of many experts, with the narrower dtype that the files have."""
        if self._dtype != torch.float32 or self._device.type != "cpu":
            return {}
        found = {}
        for name, module in self.model.named_modules():
            if name.startswith(tuple(f"{place}." for place in places)) and not name.startswith(self._mixers):
                dtypes = {tensor.dtype for stem, tensor in stored.items() if stem.startswith(f"{name}.")}
                if dtypes in NARROWER and any(weight.dim() == 3 for weight in module.parameters(recurse=False)):
                    found[name] = dtypes.pop()
        return found

    def _loaded(
        self, layer: int, stored: Mapping[str, Stored], places: list[str], dtype: torch.dtype,
        *, without: Iterable[str] = (),
    ) -> dict[str, Tensor]:  # fmt: skip
        """What is in these places of the model, loaded by the stock class as it would load the whole model."""
        stock = type(self.model)

        class Part(stock):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                for place in without:
                    owner, _, name = place.rpartition(".")
                    setattr(self.get_submodule(owner), name, nn.Module())
                _keep_only(self, places)

        Part.__name__ = stock.__name__
        with warnings.catch_warnings(), refusals(), _nothing_read_ahead():
            warnings.simplefilter("ignore")
            quiet_transformers()
            model, report = Part.from_pretrained(
                None, config=self.model.config, state_dict=dict(stored), dtype=dtype, output_loading_info=True
            )
        if wrong := [*report["missing_keys"], *report["mismatched_keys"]]:
            raise ModelError(f"the stock class does not load {len(wrong)} tensors of layer {layer}, such as {wrong[0]}")
        loaded: dict[str, Tensor] = model.state_dict()
        return loaded

    @contextmanager
    def holding(self, layer: int, weights: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """While open, a layer has these weights, by their names in the running model."""
        place = self.place_of(layer)
        module = self.model.get_submodule(place)
        on_device = {name.removeprefix(f"{place}."): tensor.to(self._device) for name, tensor in weights.items()}
        module.load_state_dict(on_device, assign=True)
        module.requires_grad_(False)
        try:
            yield module
        finally:
            for owner in module.modules():
                for name, weight in owner.named_parameters(recurse=False):
                    setattr(owner, name, _without_memory(weight))

    def first_states(self, embedded: Tensor) -> Tensor:
        """What enters the first layer, from what the embedding gives."""
        return self._run(-1, None, embedded)

    def run(self, layer: int, states: Tensor, embedded: Tensor) -> Tensor:
        """What a layer makes of the hidden states that enter it."""
        return self._run(layer, states, embedded)

    def run_mixer(self, layer: int, mixer: str, states: Tensor, embedded: Tensor) -> None:
        """Run a layer as far as its mixer, which lies at this place, for those who watch that."""

        def leave(*_: object) -> None:
            raise _Behind(None)

        hook = self.model.get_submodule(mixer).register_forward_hook(leave)
        try:
            self._run(layer, states, embedded)
        finally:
            hook.remove()

    def _run(self, layer: int, states: Tensor | None, embedded: Tensor) -> Tensor:
        self._current, self._given = layer, states
        try:
            self.model.base_model(inputs_embeds=embedded, use_cache=False)
        except _Behind as reached:
            output = reached.output
        else:
            raise AssertionError(f"the model ran past layer {layer}")
        finally:
            self._given = None
        if isinstance(output, tuple):
            if any(_tensors(output[1:])):
                raise ModelError(
                    "the layers of this model hand on more than hidden states, such as attention residuals, and those"
                    " are all that is kept from layer to layer: it cannot be reconstructed, `recover` trains it whole"
                )
            self._beside = output[1:]
            output = output[0]
        found: Tensor = output
        return found

    def _enter(self, number: int, forward: Any, *args: Any, **options: Any) -> Any:
        """In place of the forward of every layer."""
        hidden = args[0] if args else options["hidden_states"]
        if self._current < 0:
            raise _Behind(hidden)
        if number < self._current:
            return hidden if self._beside is None else (hidden, *self._beside)
        if args:
            args = (self._given, *args[1:])
        else:
            options["hidden_states"] = self._given
        raise _Behind(forward(*args, **options))

    def embedding_name(self) -> str:
        """The weight of the embedding in the files."""
        embedding = self.model.get_input_embeddings()
        return (
            self._stored(next(name for name, module in self.model.named_modules() if module is embedding)) + ".weight"
        )

    def embedded(self, rows: Tensor) -> Tensor:
        """What the embedding makes of tokens, from the rows of its weight that are theirs."""
        module = self.model.get_input_embeddings()
        whole, padding = module.weight, module.padding_idx
        module.weight, module.padding_idx = nn.Parameter(rows.to(self._dtype), requires_grad=False), None
        try:
            with torch.no_grad():
                found: Tensor = module(torch.arange(len(rows))).to(self._device)
            return found
        finally:
            module.weight, module.padding_idx = whole, padding


def _tensors(values: Iterable[Any]) -> Iterator[bool]:
    """True for each tensor in what may hold lists of them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield True


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _nothing_read_ahead() -> Iterator[None]:
    """The stock class reads a tensor when it is needed, and not all of them by threads while the first is joined."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _without_memory(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), requires_grad=False)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Modules that are made while this is open have buffers with contents, and parameters with none."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else _without_memory(parameter))

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _keep_only(model: Any, places: list[str]) -> None:
    """Take everything out of a model that is neither in one of these places nor on the way there."""
    _empty(model, places, "")
    kept = set(dict(model.named_parameters()))
    for owner in (model, model.base_model):
        tied = getattr(owner, "all_tied_weights_keys", None)
        if tied:
            owner.all_tied_weights_keys = {name: source for name, source in tied.items() if {name, source} <= kept}


def _empty(module: nn.Module, places: list[str], path: str) -> None:
    """Of a module on the way; what leads nowhere gives way to an empty one."""
    module._parameters.clear()
    for name, child in list(module.named_children()):
        place = f"{path}{name}"
        if any(each.startswith(f"{place}.") for each in places):
            _empty(child, places, f"{place}.")
        elif place not in places:
            setattr(module, name, nn.Module())
