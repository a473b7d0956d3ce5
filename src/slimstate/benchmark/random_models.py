"""Build layers and models with random weights on the device, from a config at any key dim."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slimstate.benchmark.options import MixerBenchConfig, ModelsBenchConfig, split_dims
from slimstate.checkpoints.reader import Checkpoint
from slimstate.families import FAMILIES, Config, family_of
from slimstate.families.contract import Library
from slimstate.models.load import load
from slimstate.models.shapes import read_shape
from slimstate.models.stock import stock_model
from slimstate.system.errors import PlanError
from slimstate.system.json_files import JsonObject


def config_of(model: str) -> JsonObject:
    """Return the config of a model folder, of a config file, or of a shipped config."""
    return dict(Checkpoint.open(model).config) if Path(model).is_dir() else read_shape(model)


def library_of(models: Sequence[str]) -> Library:
    """Return "transformers" if the stock class of any of the models comes from there, else "fla"."""
    libraries = {family_of(config_of(model)).library for model in models}
    return "transformers" if "transformers" in libraries else "fla"


def mixer_config(model_type: str, dims: int | str, shape: MixerBenchConfig) -> JsonObject:
    """Return a config of one layer whose mixer has this shape; its type must have a field for each size."""
    family, (key_dim, value_dim) = FAMILIES.get(model_type), split_dims(dims)
    shape = shape if value_dim is None else replace(shape, value_dim=value_dim)
    sizes = {} if family is None else _size_fields(family.defaults, key_dim, shape)
    if family is None or not sizes:
        names = (name for name, other in FAMILIES.items() if _size_fields(other.defaults, key_dim, shape))
        raise PlanError(f"no mixer benchmark for {model_type!r}; choose from {', '.join(names)}")
    config = {
        "model_type": model_type, "hidden_size": shape.hidden, "num_heads": shape.heads, "num_hidden_layers": 1,
        "intermediate_size": 16, "vocab_size": 16, **sizes,
    }  # fmt: skip
    if shape.no_gate and family.defaults.get("use_gate"):
        config["use_gate"] = False
    return dict(family_of(config).resize(config, key_dim, corrected=False))


def _size_fields(defaults: Config, key_dim: int, shape: MixerBenchConfig) -> dict[str, float]:
    """Return the fields that set key and value dim: ratios to the hidden size, or a head dim and a ratio to it."""
    if {"expand_k", "expand_v"} <= defaults.keys():
        return {
            "expand_k": shape.heads * key_dim / shape.hidden, "expand_v": shape.heads * shape.value_dim / shape.hidden
        }  # fmt: skip
    if {"head_dim", "expand_v"} <= defaults.keys():
        return {"head_dim": key_dim, "expand_v": shape.value_dim / key_dim}
    return {}


def width_of(config: Config) -> int:
    return family_of(config).mixers(config)[0].axis.width


def dims_in(config: Config) -> dict[str, Any]:
    sizes = family_of(config).sizes(config)
    return {"key_dim": sizes.width, "value_dim": sizes.value_dim}


def resized(config: Config, dims: int | str) -> JsonObject:
    """Return the config at a key dim, or at a key and a value dim, neither above the model's own."""
    family, own, (key_dim, value_dim) = family_of(config), dims_in(config), split_dims(dims)
    for name, dim in (("key_dim", key_dim), ("value_dim", value_dim)):
        if dim is not None and not 1 <= dim <= own[name]:
            words = name.replace("_", " ")
            raise PlanError(f"the {words} must be between 1 and {own[name]}, the width of the model, got {dim}")
    cuts_values = value_dim is not None and value_dim < own["value_dim"]
    if cuts_values and (reason := family.value_refusal(config)) is not None:
        raise PlanError(f"the values of {family.model_type} cannot be cut: {reason}")
    is_own = key_dim == own["key_dim"] and not cuts_values
    return dict(config if is_own else family.resize(config, key_dim, value_dim))


def row_fields(model: str, dims: int | str) -> dict[str, Any]:
    return {"model": model, **dims_in(resized(config_of(model), dims))}


def models_at_dims(options: ModelsBenchConfig) -> list[tuple[str, int | str]]:
    """Return each model at each of the dims; by default at its own key dim, a half and a quarter of it."""
    cases: list[tuple[str, int | str]] = []
    for model in options.models:
        config = config_of(model)
        width = width_of(config)
        for dims in options.key_dims or (width, width // 2, width // 4):
            resized(config, dims)  # raises before anything is timed
            cases.append((model, dims))
    return cases


def random_model(config: Config, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the stock model with random weights, created on the device."""
    torch.manual_seed(0)
    return stock_model(config, device, dtype).to(dtype).eval()


def model_for(model: str, dims: int | str, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a model folder at its own dims; otherwise build the model with random weights."""
    config = config_of(model)
    cut = resized(config, dims)
    if Path(model).is_dir() and cut == config:
        return load(Path(model), device=device.type, dtype=str(dtype).removeprefix("torch.")).model
    return random_model(cut, device, dtype)


def mixer_of(config: Config, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the mixer of a random model's first linear-attention layer."""
    mixer: nn.Module = random_model(config, device, dtype).get_submodule(family_of(config).mixers(config)[0].path)
    return mixer
