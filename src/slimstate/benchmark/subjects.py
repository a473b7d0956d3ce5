"""What is timed: layers and models with random weights, made on the device from a config of any key dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slimstate.checkpoints.reader import Checkpoint
from slimstate.families import family_of
from slimstate.families.contract import Library
from slimstate.models.load import load
from slimstate.models.stock import stock_model
from slimstate.system.errors import PlanError
from slimstate.training.initial_model import read_config

Config = Mapping[str, Any]


def config_of(model: str) -> dict[str, Any]:
    """That of a model folder, of a config file, or of a name in the package."""
    return dict(Checkpoint.open(model).config) if Path(model).is_dir() else read_config(model)


def library_of(models: Sequence[str]) -> Library:
    """Where the stock classes of some models are: transformers, if any of them is there."""
    found = {family_of(config_of(model)).library for model in models}
    return "transformers" if "transformers" in found else "fla"


def mixer_config(model_type: str, *, hidden: int, heads: int, key_dim: int, value_dim: int) -> dict[str, Any]:
    """A model of one layer whose mixer has these sizes."""
    sizes: dict[str, dict[str, Any]] = {
        "delta_net": {"expand_k": heads * key_dim / hidden, "expand_v": heads * value_dim / hidden},
        "gated_deltanet": {"head_dim": key_dim, "expand_v": value_dim / key_dim},
    }
    if model_type not in sizes:
        raise PlanError(f"no mixer benchmark for {model_type!r}; there are {', '.join(sizes)}")
    config = {
        "model_type": model_type, "hidden_size": hidden, "num_heads": heads, "num_hidden_layers": 1,
        "intermediate_size": 16, "vocab_size": 16, **sizes[model_type],
    }  # fmt: skip
    return dict(family_of(config).resize(config, key_dim, corrected=False))


def width_of(config: Config) -> int:
    return family_of(config).mixers(config)[0].axis.width


def resized(config: Config, key_dim: int) -> dict[str, Any]:
    """The same model at a key dim of at most its own."""
    width = width_of(config)
    if not 1 <= key_dim <= width:
        raise PlanError(f"key dim {key_dim} of a model of width {width}: it must lie between 1 and {width}")
    return dict(config if key_dim == width else family_of(config).resize(config, key_dim))


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


def in_words(model_type: str) -> str:
    return {"delta_net": "DeltaNet", "gated_deltanet": "Gated DeltaNet"}.get(model_type, model_type)
