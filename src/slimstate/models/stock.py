"""The stock classes of a family: build models from a config, and find tensors that they would not load."""

import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slimstate.checkpoints.formats import unquantised
from slimstate.families import Config, Family, family_of
from slimstate.models.prepare import prepare
from slimstate.system.errors import ModelError, SlimstateError, reason_of
from slimstate.system.json_files import JsonObject

Difference = tuple[str, list[int] | None, list[int] | None]
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # their number, in the configs of transformers


def stock_class(family: Family, *, whole: bool = False) -> tuple[Any, Any]:
    """Return the config class and the model class: of the language model, or with `whole` of everything in the files.

    Classes of transformers are looked up by name, because importing fla registers others for some model types.
    """
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    if family.library == "fla":
        return transformers.AutoConfig, transformers.AutoModelForCausalLM
    names, kind = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, family.language_type
    if whole or family.tower is not None:
        names, kind = {**names, **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}, family.model_type
    try:
        config_class, model_class = configuration_auto.CONFIG_MAPPING_NAMES[family.model_type], names[kind]
    except KeyError as error:
        raise ModelError(f"transformers {transformers.__version__} has no {family.model_type}") from error
    return getattr(transformers, config_class), getattr(transformers, model_class)


def tied_weights(model: Any) -> frozenset[str]:
    """Return the parameters that share the memory of others, which the files may leave out."""
    return frozenset(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else frozenset()


def stock_differences(config: Config, shapes: Mapping[str, list[int]]) -> list[Difference]:
    """Return the tensors that the stock class would not load: name, shape or None, expected shape or None.

    Nothing is allocated. Transformers loads tensors on the meta device, and so renames and joins them as usual.
    """
    family = family_of(config)
    if family.library == "transformers":
        return _loading_differences(family, config, shapes)
    model = stock_model(config)
    tied = tied_weights(model)
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    names = (name for name in (*expected, *shapes) if name in shapes or name not in tied)
    pairs = {name: (shapes.get(name), expected.get(name)) for name in names}
    return [(name, shape, other) for name, (shape, other) in pairs.items() if shape != other]


def _loading_differences(family: Family, config: Config, shapes: Mapping[str, list[int]]) -> list[Difference]:
    prepare(family.model_type)
    config_class, model_class = stock_class(family, whole=True)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    quiet_transformers()
    with refusals():
        model, report = model_class.from_pretrained(
            None, config=_settings(config_class, config), state_dict=empty, device_map="meta",
            ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    _check_experts(model.config.get_text_config())
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    missing: list[Difference] = [(name, None, expected[name]) for name in sorted(report["missing_keys"])]
    return missing + [(name, list(shape), list(other)) for name, shape, other in sorted(report["mismatched_keys"])]


def _check_experts(text: Any) -> tuple[int, int]:
    """Return how many experts a layer has and a token uses; refuse more than there are, which would fail only later."""
    experts = next((number for name in EXPERTS if (number := getattr(text, name, None))), 0)
    active = getattr(text, "num_experts_per_tok", 0)
    if not isinstance(active, int) or not isinstance(experts, int):
        return 0, 0
    if active > experts > 0:
        raise ModelError(f"config.json: num_experts_per_tok {active} must be at most the {experts} experts")
    return experts, active


def routed_experts(config: Config) -> tuple[int, float]:
    """Return the number of parameters in experts that tokens are routed to, and the share of them that a token uses."""
    if not any(family_of(config).with_defaults(config).get(name) for name in EXPERTS):
        return 0, 0.0
    model = stock_model(config)
    experts, active = _check_experts(model.config.get_text_config())
    shapes = [parameter.shape for parameter in model.parameters() if parameter.ndim == 3]
    return sum(shape.numel() for shape in shapes if shape[0] == experts and shape[1] > 1), active / max(1, experts)


def _settings(config_class: Any, config: Config) -> Any:
    """Return a config as its class reads it from a file, where numbers such as infinity are written differently."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(dict(config)), encoding="utf-8")
        return config_class.from_json_file(path)


def as_published(config: Config) -> JsonObject:
    """Return a config with the fields of published checkpoints, for programs that read no others.

    A field is added only if the stock class still reads the same config, and changed only if it reads it the same way.
    """
    family, published = family_of(config), dict(config)
    if family.library == "fla":
        return published
    config_class, _ = stock_class(family, whole=True)
    with refusals():
        before = _settings(config_class, config).to_dict()
        for name, value in family.published(config).items():
            after = _settings(config_class, {**published, name: value}).to_dict()
            required = {key: item for key, item in before.items() if key != name or config.get(key) is not None}
            if _includes(after, required):
                published[name] = value
    return published


def _includes(config: Any, required: Any) -> bool:
    """Return whether a config has all required values; it may have more."""
    if isinstance(required, Mapping) and isinstance(config, Mapping):
        return all(_includes(config.get(key), value) for key, value in required.items())
    return bool(config == required)


def text_settings(family: Family, settings: Any) -> Any:
    """Return the part of a transformers config that describes the language model, as the class that runs it reads it.

    If that part has a model type of its own, the config around it says whether embeddings are tied.
    """
    text = settings if family.tower is not None else settings.get_text_config()
    if text is not settings and hasattr(settings, "quantization_config"):
        text.quantization_config = settings.quantization_config
    if family.language_type != family.model_type:
        text.tie_word_embeddings = settings.tie_word_embeddings
    return text


@contextmanager
def refusals(what: str = "the stock class refuses this config") -> Iterator[None]:
    """Turn whatever a library raises for an untrusted config or file into a `ModelError`, and ignore its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except SlimstateError:
        raise
    except Exception as error:  # of many kinds
        raise ModelError(f"{what}: {reason_of(error)}") from error


def stock_model(config: Config, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """Build the stock language model with random weights on a device; without a device nothing is allocated."""
    from transformers.modeling_utils import local_torch_dtype

    family, config = family_of(config), unquantised(config)
    prepare(family.model_type)
    config_class, model_class = stock_class(family)
    with local_torch_dtype(dtype), device or torch.device("meta"), refusals():
        if family.library == "transformers":
            return without_tower(family, model_class(text_settings(family, _settings(config_class, config))))
        others = {key: value for key, value in config.items() if key != "model_type"}
        return model_class.from_config(config_class.for_model(family.model_type, **others), trust_remote_code=False)


def without_tower(family: Family, model: Any) -> Any:
    """Return the model without the part that only images need."""
    if family.tower is not None:
        owner, _, name = family.tower.rpartition(".")
        setattr(model.get_submodule(owner), name, torch.nn.Module())
    return model


def quiet_transformers() -> None:
    """Turn off the progress bars and warnings of transformers; the reporter shows that a model is loaded."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
