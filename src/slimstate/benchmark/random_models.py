"""What is timed: layers and models with random weights, made on the device from a config of any key dim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slimstate.checkpoints.reader import Checkpoint
from slimstate.families import FAMILIES, Config, family_of
from slimstate.families.contract import Library
from slimstate.models.load import load
from slimstate.models.stock import stock_model
from slimstate.records.benchmark import MixerShape
from slimstate.system.errors import PlanError
from slimstate.system.json_files import JsonObject
from slimstate.training.initial_model import read_config


def config_of(model: str) -> JsonObject:
    """That of a model folder, of a config file, or of a name in the package."""
    return dict(Checkpoint.open(model).config) if Path(model).is_dir() else read_config(model)


def library_of(models: Sequence[str]) -> Library:
    """Where the stock classes of some models are: transformers, if any of them is there."""
    found = {family_of(config_of(model)).library for model in models}
    return "transformers" if "transformers" in found else "fla"


def mixer_config(model_type: str, key_dim: int, shape: MixerShape) -> JsonObject:
    """A model of one layer whose mixer has these sizes, for types whose config has a field for each of them."""
    family = FAMILIES.get(model_type)
    sizes = {} if family is None else _widths(family.defaults, key_dim, shape)
    if family is None or not sizes:
        known = (name for name, other in FAMILIES.items() if _widths(other.defaults, key_dim, shape))
        raise PlanError(f"no mixer benchmark for {model_type!r}; there are {', '.join(known)}")
    config = {
        "model_type": model_type, "hidden_size": shape.hidden, "num_heads": shape.heads, "num_hidden_layers": 1,
        "intermediate_size": 16, "vocab_size": 16, **sizes,
    }  # fmt: skip
    if shape.no_gate and family.defaults.get("use_gate"):
        config["use_gate"] = False
    return dict(family_of(config).resize(config, key_dim, corrected=False))


def _widths(defaults: Config, key_dim: int, shape: MixerShape) -> dict[str, float]:
    """The fields that set key and value dim: ratios to the hidden size, or a head dim and a ratio to that."""
    if {"expand_k", "expand_v"} <= defaults.keys():
        return {
            name: shape.heads * size / shape.hidden
            for name, size in (("expand_k", key_dim), ("expand_v", shape.value_dim))
        }
    if {"head_dim", "expand_v"} <= defaults.keys():
        return {"head_dim": key_dim, "expand_v": shape.value_dim / key_dim}
    return {}


def width_of(config: Config) -> int:
    return family_of(config).mixers(config)[0].axis.width


def check_key_dim(config: Config, key_dim: int) -> int:
    """A key dim that the model can have: at most its own."""
    width = width_of(config)
    if not 1 <= key_dim <= width:
        raise PlanError(f"key dim {key_dim} of a model of width {width}: it must lie between 1 and {width}")
    return key_dim


def resized(config: Config, key_dim: int) -> JsonObject:
    """The same model at a key dim of at most its own."""
    keep = check_key_dim(config, key_dim)
    return dict(config if keep == width_of(config) else family_of(config).resize(config, keep))


def random_model(config: Config, device: torch.device, dtype: torch.dtype) -> Any:
    """The stock model with random weights, made where it will run."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = stock_model(config, device)
    finally:
        torch.set_default_dtype(before)
    return model.to(dtype).eval()


def model_for(model: str, key_dim: int, device: torch.device, dtype: torch.dtype) -> Any:
    """The weights of a model folder at its own key dim; random ones where there are none."""
    if Path(model).is_dir() and key_dim == width_of(config_of(model)):
        return load(Path(model), device=device.type, dtype=str(dtype).removeprefix("torch.")).model
    return random_model(resized(config_of(model), key_dim), device, dtype)


def mixer_of(config: Config, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The mixer of a model's first linear-attention layer."""
    mixer: nn.Module = random_model(config, device, dtype).get_submodule(family_of(config).mixers(config)[0].path)
    return mixer
