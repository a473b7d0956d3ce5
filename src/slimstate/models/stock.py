"""The stock classes of a family: models of a config, and what of a model's tensors they would not load."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slimstate.families import Family, family_of
from slimstate.models.prepare import prepare
from slimstate.system.errors import ModelError, SlimstateError, reason_of
from slimstate.system.json_files import JsonObject


def stock_class(family: Family, *, whole: bool = False) -> tuple[Any, Any]:
    """The config class and the model class of a family: a language model, or with `whole` all that the files hold.

    Transformers' own classes are taken by name: importing fla registers other ones for some model types.
    """
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    if family.library == "fla":
        return transformers.AutoConfig, transformers.AutoModelForCausalLM
    names, kind = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, family.language_type
    if whole:
        names, kind = {**names, **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}, family.model_type
    try:
        found = configuration_auto.CONFIG_MAPPING_NAMES[family.model_type], names[kind]
    except KeyError as error:
        raise ModelError(f"transformers {transformers.__version__} has no {family.model_type}") from error
    return getattr(transformers, found[0]), getattr(transformers, found[1])


def tied_weights(model: Any) -> frozenset[str]:
    """The parameters that are others by another name, and need not be in the files."""
    return frozenset(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else frozenset()


Difference = tuple[str, list[int] | None, list[int]]


def stock_differences(config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> list[Difference]:
    """Where tensors of these shapes are not what the stock class asks for: name, shape or None, shape asked for.

    Nothing is allocated. Transformers loads tensors without contents, so that whatever it renames or joins is.
    """
    family = family_of(config)
    if family.library == "transformers":
        return _loading_differences(family, config, shapes)
    model = stock_model(config)
    tied = tied_weights(model)
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    return [
        (name, shapes.get(name), shape)
        for name, shape in expected.items()
        if shapes.get(name) != shape and not (name in tied and name not in shapes)
    ]


def _loading_differences(
    family: Family, config: Mapping[str, Any], shapes: Mapping[str, list[int]]
) -> list[Difference]:
    prepare(family.model_type)
    config_class, model_class = stock_class(family, whole=True)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with warnings.catch_warnings(), refusals():
        warnings.simplefilter("ignore")
        quiet_transformers()
        model, report = model_class.from_pretrained(
            None,
            config=_settings(config_class, config),
            state_dict=empty,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_experts(model.config.get_text_config())
    asked = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    missing: list[Difference] = [(name, None, asked[name]) for name in sorted(report["missing_keys"])]
    return missing + [(name, list(found), list(want)) for name, found, want in sorted(report["mismatched_keys"])]


def _check_experts(text: Any) -> None:
    """A router that is to choose more experts than there are fails only when it runs."""
    chosen = getattr(text, "num_experts_per_tok", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((number for name in names if (number := getattr(text, name, None))), None)
    if isinstance(chosen, int) and isinstance(experts, int) and chosen > experts:
        raise ModelError(f"config.json: every token goes to {chosen} experts, and there are {experts}")


def _settings(config_class: Any, config: Mapping[str, Any]) -> Any:
    """A config as its class reads it from a file: numbers such as infinity are written in a way of their own there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(dict(config)), encoding="utf-8")
        return config_class.from_json_file(path)


def as_published(config: Mapping[str, Any]) -> JsonObject:
    """A config with what published checkpoints say beside it or in its place, for programs that read nothing else.

    A field is changed only where the stock class reads all others, and this one if it was set, as before.
    """
    family, found = family_of(config), dict(config)
    if family.library == "fla":
        return found
    config_class, _ = stock_class(family, whole=True)
    with warnings.catch_warnings(), refusals():
        warnings.simplefilter("ignore")
        before = _settings(config_class, config).to_dict()
        for name, value in family.published(config).items():
            after = _settings(config_class, {**found, name: value}).to_dict()
            judged = {key: said for key, said in before.items() if key != name or config.get(key) is not None}
            if _holds(after, judged):
                found[name] = value
    return found


def _holds(after: Any, before: Any) -> bool:
    """Whether all that was said is said still; there may be more."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return all(_holds(after.get(key), said) for key, said in before.items())
    return bool(after == before)


def text_settings(family: Family, settings: Any) -> Any:
    """The part of a config of transformers that is about the language model.

    Where that has a class of another type, whether embeddings are tied is said by the config of the whole.
    """
    text = settings.get_text_config()
    if family.language_type != family.model_type:
        text.tie_word_embeddings = settings.tie_word_embeddings
    return text


@contextmanager
def refusals(what: str = "the stock class refuses this config") -> Iterator[None]:
    """What a library has against a stranger's config or files, as one line."""
    try:
        yield
    except SlimstateError:
        raise
    except Exception as error:  # of many kinds: a library's answer to what a stranger wrote
        raise ModelError(f"{what}: {reason_of(error)}") from error


def stock_model(config: Mapping[str, Any], device: torch.device | None = None) -> Any:
    """The stock language model of a config with random weights on a device; without one nothing is allocated."""
    family = family_of(config)
    prepare(family.model_type)
    config_class, model_class = stock_class(family)
    with warnings.catch_warnings(), device or torch.device("meta"), refusals():
        warnings.simplefilter("ignore")
        if family.library == "transformers":
            return model_class(text_settings(family, _settings(config_class, config)))
        others = {key: value for key, value in config.items() if key != "model_type"}
        return model_class.from_config(config_class.for_model(family.model_type, **others), trust_remote_code=False)


def quiet_transformers() -> None:
    """Its progress bars and remarks are about loading, of which the reporter speaks."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
