"""Tiny models as engines other than transformers can read them: the sizes and the kinds of layers of published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import slimstate
import tiny
from slimstate.models.stock import as_published
from slimstate.system.json_files import read_json, write_json
from tiny_model import COMMON, MIXTURE, VISION, Variant

GATED = {**MIXTURE, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
DENSE = {name: value for name, value in GATED.items() if "expert" not in name and "moe" not in name}
NESTED = {"text_config": {**COMMON, **DENSE}, "vision_config": VISION}


def mamba(name: str, **changes: Any) -> Variant:
    found = tiny.VARIANTS[name]
    return Variant(name, found.model_type, {**found.options, **changes})


HYBRID = {"mamba_d_state": 128, "mamba_n_groups": 1}
EXPERTS = {"time_step_min": 1e-9}  # mlx-lm does not clamp at it, so it must be too small to matter
MODELS = {
    "qwen3_next": Variant("qwen3_next", "qwen3_next", GATED),
    "qwen3_5": Variant("qwen3_5", "qwen3_5", NESTED),
    "mamba2": mamba("mamba2-one-group", state_size=128),
    "mamba2-groups": mamba("mamba2-plain", state_size=128),
    "granitemoehybrid": mamba("granitemoehybrid-plain", **HYBRID),
    "falcon_h1": mamba("falcon_h1-plain", **HYBRID),
    "nemotron_h": mamba("nemotron_h-plain", ssm_state_size=128, **EXPERTS),
}


def uncut(name: str, folder: Path) -> Path:
    """A model with a config as published checkpoints have it."""
    tiny.save(tiny.build(MODELS[name]), folder)
    write_json(folder / "config.json", as_published(read_json(folder / "config.json")))
    return folder


def cut(model: Path, key_dim: int) -> Path:
    """The model beside it that keeps so many channels."""
    out = model.with_name(f"{model.name}-{key_dim}")
    slimstate.prune(model, out, method="l1", key_dim=key_dim)
    return out
