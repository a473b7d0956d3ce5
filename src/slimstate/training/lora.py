"""What of a model is trained: low-rank adapters on projections and the convolutions whole, whole mixers, or everything.

Adapters are PEFT's. The convolutions are small and not linear maps, so PEFT trains copies of them (`modules_to_save`);
an adapter that is kept therefore holds them too. So it does norms and biases, where those are unfrozen; biases that
are no part of a module of their own are trained where they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slimstate.core.layout import Mixer
from slimstate.families import family_of
from slimstate.families.contract import Config, Library
from slimstate.models.stock import stock_model, tied_weights
from slimstate.records.training import AdaptationSettings
from slimstate.system.errors import PlanError
from slimstate.training.shared_filters import expand, share

ALL_LINEAR = "all-linear"
WITHIN_PEFT, ADAPTER_WEIGHTS = "base_model.model.", "adapter_model.safetensors"
UNFREEZABLE = ("norms", "biases")
NEVER_CALLED = ("attn_res_proj", "mlp_res_proj", "res_proj")  # linear maps of which fla only reads the weight


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """The modules that get an adapter and those trained whole, by their full names; with `full`, all weights.

    `mixers` are trained whole, without adapters.

    Filters that the `shared` mixers train as one stay one. `norms` are modules that are trained whole too, wherever in
    the model they are; `biases` are parameters, those of modules that are trained whole left out.
    """

    targets: tuple[str, ...]
    convolutions: tuple[str, ...]
    norms: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    rank: int = 16
    alpha: int = 32
    full: bool = False
    mixers: tuple[str, ...] = ()
    shared: tuple[Mixer, ...] = ()
    library: Library = "fla"

    @classmethod
    def of(
        cls,
        config: Config,
        mixers: Sequence[Mixer],
        chosen: str | None = None,
        *,
        rank: int = 16,
        alpha: int = 32,
        full: bool = False,
        whole_mixers: bool = False,
        unfreeze: str | None = None,
    ) -> Adaptation:
        """The projections and convolutions of the mixers, or the linear maps whose names end as `chosen` says.

        `unfreeze` adds all norms of the model, all its biases, or both.
        """
        shared = tuple(mixer for mixer in mixers if mixer.sharing is not None)
        if full or whole_mixers:
            if full and whole_mixers:
                raise PlanError("give either `full` or `mixers`")
            if chosen is not None or unfreeze is not None:
                what = "`full` trains all weights" if full else "`mixers` trains those whole, without adapters"
                raise PlanError(f"{what}: leave out `lora_targets` and `unfreeze`")
            return cls(
                targets=(), convolutions=(), full=full, mixers=() if full else tuple(mixer.path for mixer in mixers),
                shared=shared, library=family_of(config).library,
            )  # fmt: skip
        if rank < 1 or alpha <= 0:
            raise PlanError(f"LoRA of rank {rank} and alpha {alpha}: both must be at least 1")
        named = tuple(f"{mixer.path}.{name}" for mixer in mixers for name in mixer.projections)
        targets = named if chosen is None else _matching(config, mixers, chosen)
        convolutions = tuple(f"{mixer.path}.{name}" for mixer in mixers for name in mixer.convolutions)
        norms, biases = _unfrozen(config, convolutions, unfrozen_kinds(unfreeze))
        return cls(
            targets=targets, convolutions=convolutions, norms=norms, biases=biases, rank=rank, alpha=alpha,
            shared=shared, library=family_of(config).library,
        )  # fmt: skip

    @property
    def adapted(self) -> bool:
        """Whether there are adapters."""
        return not (self.full or self.mixers)

    def _in_mixers(self, name: str) -> bool:
        return any(name.startswith(f"{path}.") for path in self.mixers)

    @property
    def whole(self) -> tuple[str, ...]:
        """The modules of which PEFT trains copies."""
        return (*self.convolutions, *self.norms)

    def weights(self, config: Config) -> tuple[str, ...]:
        """The parameters that training changes, as the running model names them; without those that are tied."""
        model = stock_model(config)
        names = [name for name, _ in model.named_parameters()]
        if self.full:
            tied = tied_weights(model)
            return tuple(name for name in names if name not in tied)
        if self.mixers:
            return tuple(filter(self._in_mixers, names))
        single, whole = {*(f"{name}.weight" for name in self.targets), *self.biases}, {*self.whole}
        return tuple(name for name in names if name in single or name.rpartition(".")[0] in whole)

    def attach(self, model: Any) -> Any:
        """The model with only these parts left to train, those in float32."""
        share(model, self.shared)
        if not self.adapted:
            adapted = model
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(self.full or self._in_mixers(name))
        else:
            adapted = self._with_adapters(model)
            for _, bias in self._biases_of(adapted):
                bias.requires_grad_(True)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return adapted

    def _with_adapters(self, model: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        if self.library == "fla":
            _unfuse(model, self.targets)
        settings = LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=0.0,
            target_modules=list(self.targets),
            modules_to_save=list(self.whole) or None,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # names of transformers that PEFT uses and will not have
            return get_peft_model(model, settings)

    def _biases_of(self, adapted: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The biases to train, as an adapted model names them."""
        for name, parameter in adapted.named_parameters():
            if name.removeprefix(WITHIN_PEFT).replace(".base_layer.", ".") in self.biases:
                yield name, parameter

    def merged(self, model: Any, trained: Mapping[str, Tensor], keep: Path | None = None) -> dict[str, Tensor]:
        """The weights of `model` that training changed, as the stock class names them; `keep` also gets the adapter."""
        adapted = self.attach(model)
        if trainable(adapted).keys() != trained.keys():
            odd = sorted(trainable(adapted).keys() ^ trained.keys())
            raise AssertionError(f"{odd[0]} is in the model or was trained, but not both")
        adapted.load_state_dict(dict(trained), strict=False)
        if not self.adapted:
            expand(adapted)
            found = dict(adapted.state_dict())
            return found if self.full else {name: found[name] for name in filter(self._in_mixers, found)}
        if keep is not None:
            adapted.save_pretrained(keep)
            if self.biases:
                _add_tensors(keep / ADAPTER_WEIGHTS, dict(self._biases_of(adapted)))
        merged = adapted.merge_and_unload(safe_merge=True)
        expand(merged)
        parts = {*self.targets, *self.whole}
        return {
            name: tensor
            for name, tensor in merged.state_dict().items()
            if name in self.biases or name.rpartition(".")[0] in parts
        }

    def describe(self) -> AdaptationSettings:
        """What it does, without a list of every layer."""
        if not self.adapted:
            return AdaptationSettings(full=self.full, mixers=len(self.mixers) or None)
        return AdaptationSettings(
            full=False,
            lora_rank=self.rank,
            lora_alpha=self.alpha,
            targets=_last_names(self.targets),
            convolutions=_last_names(self.convolutions),
            unfrozen=_last_names((*self.norms, *self.biases)),
            modules=len(self.targets),
        )


def _add_tensors(path: Path, more: Mapping[str, Tensor]) -> None:
    """Write some more tensors into a file of PEFT's, which loads whatever has the name of a parameter."""
    from safetensors.torch import load_file, save_file

    held = load_file(path)
    save_file({**held, **{name: tensor.detach().contiguous() for name, tensor in more.items()}}, path, {"format": "pt"})


def _last_names(parts: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted({part.rpartition(".")[2] for part in parts}))


def unfrozen_kinds(unfreeze: str | None) -> tuple[str, ...]:
    """The kinds of parameters that a comma list names."""
    kinds = tuple(kind for kind in map(str.strip, (unfreeze or "").split(",")) if kind)
    for kind in kinds:
        if kind not in UNFREEZABLE:
            raise PlanError(f"`unfreeze` {kind}: there are {', '.join(UNFREEZABLE)}")
    if unfreeze is not None and not kinds:
        raise PlanError(f"`unfreeze` names nothing: there are {', '.join(UNFREEZABLE)}")
    return kinds


def _unfrozen(
    config: Config, convolutions: Sequence[str], kinds: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All norms of a model that have weights, and the names of all its biases outside of convolutions and norms."""
    if not kinds:
        return (), ()
    model = stock_model(config)
    norms = tuple(
        name
        for name, part in model.named_modules()
        if "norms" in kinds and "norm" in type(part).__name__.lower() and part._parameters
    )
    within = {*convolutions, *norms}
    biases = tuple(
        name
        for name, _ in model.named_parameters()
        if "biases" in kinds and "bias" in name and name.rpartition(".")[0] not in within
    )
    return norms, biases


def _unfuse(model: nn.Module, targets: Sequence[str]) -> None:
    """fla's fused MLP only reads the weight of down_proj, past an adapter."""
    from fla.modules import GatedMLP

    for name, part in model.named_modules():
        if isinstance(part, GatedMLP) and f"{name}.down_proj" in targets:
            part.fuse_swiglu = False


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, each once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _matching(config: Config, mixers: Sequence[Mixer], chosen: str) -> tuple[str, ...]:
    """The full names of the linear maps that the comma-separated endings name.

    Not among them are the output head, and maps of a mixer that are not its projections: those cannot be adapted.
    """
    model = stock_model(config)
    ours = {f"{mixer.path}.{name}" for mixer in mixers for name in mixer.projections}
    within = tuple(f"{mixer.path}." for mixer in mixers)
    head = model.get_output_embeddings()
    linear = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear)
        and part is not head
        and name.rpartition(".")[2] not in NEVER_CALLED
        and (name in ours or not name.startswith(within))
    ]
    endings = [ending.strip() for ending in chosen.split(",") if ending.strip()]
    found: set[str] = set()
    for ending in endings:
        matched = {name for name in linear if ending == ALL_LINEAR or f".{name}".endswith(f".{ending}")}
        if not matched:
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise PlanError(f"`lora_targets` {ending} matches no linear map; there are {known}, {ALL_LINEAR}")
        found |= matched
    if not found:
        raise PlanError("`lora_targets` names nothing")
    return tuple(name for name in linear if name in found)
