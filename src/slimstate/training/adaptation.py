"""Which weights of a model are trained: low-rank adapters and the convolutions, whole mixers, or all of them.

Adapters are those of PEFT. Convolutions are small and not linear layers, so PEFT trains copies of them
(`modules_to_save`), as it does of norms; an adapter that is written therefore contains them too. Biases that do not
belong to such a module are trained in place.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.layout import Mixer
from slimstate.families.contract import Config
from slimstate.models.stock import stock_model, tied_weights
from slimstate.records.training import AdaptationSettings
from slimstate.system.errors import PlanError
from slimstate.system.value import Value
from slimstate.training.options import AdaptationOptions, RecoverOptions, TrainOptions
from slimstate.training.shared_filters import expand, share

RATE, WIDTH = 5e-4, 512  # the learning rate of a recovery, for models up to this hidden size
FINAL_RATE = 0.05  # of the highest
ALL_LINEAR = "all-linear"
WITHIN_PEFT, ADAPTER_WEIGHTS = "base_model.model.", "adapter_model.safetensors"
FUSED_MLP = "GatedMLP"  # class of fla
NEVER_CALLED = ("attn_res_proj", "mlp_res_proj", "res_proj")  # linear layers of which fla only reads the weight

C = TypeVar("C", bound=RecoverOptions)


class Adaptation(Value):
    """The modules that get an adapter and those trained whole, by their full names; with `full`, all weights.

    `mixers` are trained whole, without adapters. `shared` mixers have filters that are trained as one and stay one.
    `norms` are modules of the whole model; `biases` are parameters outside of all modules that are trained whole.
    """

    targets: tuple[str, ...] = ()
    convolutions: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    rank: int = 16
    alpha: int = 32
    full: bool = False
    mixers: tuple[str, ...] = ()
    shared: tuple[Mixer, ...] = ()

    @classmethod
    def of(cls, config: Config, mixers: Sequence[Mixer], options: AdaptationOptions) -> "Adaptation":
        """Return what the options select in a model; by default, adapters on all projections of the mixers."""
        shared = tuple(mixer for mixer in mixers if mixer.sharing is not None)
        if options.full:
            return cls(full=True, shared=shared)
        if options.mixers:
            return cls(mixers=tuple(mixer.path for mixer in mixers), shared=shared)
        targets = tuple(f"{mixer.path}.{name}" for mixer in mixers for name in mixer.projections)
        if options.lora_targets is not None:
            targets = _matching(config, mixers, options.lora_targets)
        convolutions = tuple(f"{mixer.path}.{name}" for mixer in mixers for name in mixer.convolutions)
        norms, biases = _unfrozen(config, convolutions, options.unfrozen_kinds)
        return cls(
            targets=targets, convolutions=convolutions, norms=norms, biases=biases, rank=options.lora_rank,
            alpha=options.lora_alpha, shared=shared,
        )  # fmt: skip

    @property
    def has_adapters(self) -> bool:
        return not (self.full or self.mixers)

    @property
    def whole(self) -> tuple[str, ...]:
        """The modules of which PEFT trains copies."""
        return (*self.convolutions, *self.norms)

    def selects(self, name: str) -> bool:
        """Return whether training changes a parameter, by its name in the stock model."""
        if not self.has_adapters:
            return self.full or any(name.startswith(f"{path}.") for path in self.mixers)
        module, _, kind = name.rpartition(".")
        return name in self.biases or module in self.whole or (module in self.targets and kind == "weight")

    def weights(self, config: Config) -> tuple[str, ...]:
        """Return the parameters that training changes, as the running model names them, without tied ones."""
        model = stock_model(config)
        tied = tied_weights(model)
        return tuple(name for name, _ in model.named_parameters() if self.selects(name) and name not in tied)

    def attach(self, model: Any) -> Any:
        """Return the model with only these weights left to train, in float32."""
        share(model, self.shared)
        if self.has_adapters:
            model = self._with_adapters(model)
            for _, bias in self._biases_of(model):
                bias.requires_grad_(True)
        else:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(self.selects(name))
        for parameter in trainable(model).values():
            parameter.data = parameter.data.float()
        return model

    def _with_adapters(self, model: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        for name, module in model.named_modules():
            if type(module).__name__ == FUSED_MLP and f"{name}.down_proj" in self.targets:
                module.fuse_swiglu = False  # fused, the MLP of fla only reads the weight of down_proj
        settings = LoraConfig(
            task_type="CAUSAL_LM", r=self.rank, lora_alpha=self.alpha, lora_dropout=0.0,
            target_modules=list(self.targets), modules_to_save=list(self.whole) or None,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT uses names that transformers will drop
            return get_peft_model(model, settings)

    def _biases_of(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the biases to train, as a model with adapters names them."""
        for name, parameter in model.named_parameters():
            if name.removeprefix(WITHIN_PEFT).replace(".base_layer.", ".") in self.biases:
                yield name, parameter

    def merge(self, model: Any, parameters: Mapping[str, Tensor], folder: Path | None = None) -> dict[str, Tensor]:
        """Return the weights of `model` that training changed, as the stock class names them.

        The adapter is written to `folder`, where there is one.
        """
        model = self.attach(model)
        if trainable(model).keys() != parameters.keys():
            odd = sorted(trainable(model).keys() ^ parameters.keys())
            raise AssertionError(f"{odd[0]} is in the model or was trained, but not both")
        model.load_state_dict(dict(parameters), strict=False)
        if self.has_adapters:
            if folder is not None:
                model.save_pretrained(folder)
                path = folder / ADAPTER_WEIGHTS  # PEFT loads whatever has the name of a parameter
                biases = {name: bias.detach().contiguous() for name, bias in self._biases_of(model)}
                save_file({**load_file(path), **biases}, path, {"format": "pt"})
            model = model.merge_and_unload(safe_merge=True)
        expand(model)
        return {name: tensor for name, tensor in model.state_dict().items() if self.selects(name)}

    def describe(self) -> AdaptationSettings:
        """Return what is trained, without a list of every layer."""
        if not self.has_adapters:
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


def adaptation_of(options: TrainOptions, student: Checkpoint) -> Adaptation:
    """Return what is trained; refuse weights that could not be written back to files like those of the student."""
    if options.adaptation.keep_adapter and not options.adaptation.has_adapters:
        raise PlanError("`keep_adapter` needs adapters: give `lora`")
    adaptation = Adaptation.of(student.config, student.mixers, options.adaptation)
    if (name := _not_storable(adaptation, student)) is not None:
        raise PlanError(
            f"{name} cannot be trained, as the files of {student.family.model_type} models store it in another form:"
            f" {options.WAY_OUT}"
        )
    return adaptation


def resolve(options: C, student: Checkpoint) -> C:
    """Return the options with what depends on the model: the learning rates, and which weights are trained.

    All weights are trained by default; only the mixers where the files store other weights in another form.
    """
    lr = rate_for(student) if options.lr is None else options.lr
    options = replace(options, lr=lr, min_lr=lr * FINAL_RATE if options.min_lr is None else options.min_lr)
    if options.adaptation.is_set:
        return options
    everything = replace(options.adaptation, full=True)
    if _not_storable(Adaptation.of(student.config, student.mixers, everything), student) is None:
        return replace(options, adaptation=everything)
    return replace(options, adaptation=replace(options.adaptation, mixers=True))


def rate_for(student: Checkpoint) -> float:
    """Return the highest learning rate: above a hidden size of 512, it is inversely proportional to that size."""
    return RATE * min(1.0, WIDTH / student.mixers[0].input_size)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, each once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _not_storable(adaptation: Adaptation, student: Checkpoint) -> str | None:
    """Return the first weight that would be trained and that the files of the student store in another form."""
    return next((name for name in adaptation.weights(student.config) if not student.stored_names(name)), None)


def _last_names(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted({re.sub(r".*\.(?=\d*[^.\d])", "", name) for name in names}))  # with its number: "gk_proj.0"


def _unfrozen(
    config: Config, convolutions: Sequence[str], kinds: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return all norms of a model that have weights, and all its biases outside of convolutions and norms."""
    if not kinds:
        return (), ()
    model = stock_model(config)
    modules = model.named_modules() if "norms" in kinds else ()
    norms = tuple(name for name, module in modules if "norm" in type(module).__name__.lower() and module._parameters)
    within, parameters = {*convolutions, *norms}, model.named_parameters() if "biases" in kinds else ()
    return norms, tuple(name for name, _ in parameters if "bias" in name and name.rpartition(".")[0] not in within)


def _matching(config: Config, mixers: Sequence[Mixer], endings: str) -> tuple[str, ...]:
    """Return the full names of the linear layers whose names have one of the endings, separated by commas.

    The output head is left out, and so are layers of a mixer that are not its projections: they cannot be adapted.
    """
    model = stock_model(config)
    projections = {f"{mixer.path}.{name}" for mixer in mixers for name in mixer.projections}
    within, head = tuple(f"{mixer.path}." for mixer in mixers), model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and name.rpartition(".")[2] not in NEVER_CALLED
        and (name in projections or not name.startswith(within))
    ]
    targets: set[str] = set()
    for ending in filter(None, map(str.strip, endings.split(","))):
        matches = {name for name in linear if ending == ALL_LINEAR or f".{name}".endswith(f".{ending}")}
        if not matches:
            names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise PlanError(f"`lora_targets` {ending} matches no linear layer; there are {names}, {ALL_LINEAR}")
        targets |= matches
    if not targets:
        raise PlanError("`lora_targets` must name at least one linear layer")
    return tuple(name for name in linear if name in targets)
