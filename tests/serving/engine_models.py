"""Build tiny models that engines other than transformers can read, with the key dims and layers of published ones."""

import os
from pathlib import Path
from typing import Any

import pytest

import slimstate
import tiny
from slimstate.models.stock import as_published
from slimstate.system.json_files import read_json, write_json
from tiny_model import COMMON, MIXTURE, VISION, Variant

SIZE = {"vocab_size": 272}  # llama.cpp's converter expects a multiple of 16 for Mamba-2
GATED = {**MIXTURE, **SIZE, "head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
DENSE = {name: value for name, value in GATED.items() if "expert" not in name and "moe" not in name}
ROTATED = {"head_dim": 256}  # a quarter of it is rotated, in the sections that published models have
NESTED = {"text_config": {**COMMON, **DENSE, **ROTATED}, "vision_config": VISION}
SEVERAL_GROUPS = ("mamba2-groups", "granitemoehybrid-groups")


def interpreter(engine: str) -> tuple[str, list[pytest.MarkDecorator]]:
    """Return the interpreter of an engine's environment, and the marks of tests that need it."""
    variable = f"SLIMSTATE_{engine.upper()}_PYTHON"
    python, reason = os.environ.get(variable, ""), f"{variable} names no interpreter; make engines-{engine}"
    return python, [pytest.mark.slow, pytest.mark.skipif(not python, reason=reason)]


def mamba(name: str, **changes: Any) -> Variant:
    variant = tiny.VARIANTS[name]
    return Variant(name, variant.model_type, {**variant.options, **SIZE, **changes})


MAMBA = {"state_size": 128, "intermediate_size": None}  # not a field of the class, but of published configs
NO_HEADS = {"num_heads": None}  # a name of fla's that converters would read as the heads of the state
WIDE = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}  # vLLM runs no narrower ones on a CPU
HYBRID = {"mamba_d_state": 128, "mamba_n_groups": 1, **WIDE, **NO_HEADS}
EXPERTS = {
    "time_step_min": 1e-9,  # mlx-lm does not clamp at it, so it must be too small to matter
    "layers_block_type": ["mamba", "attention", "moe", "mamba"],  # llama.cpp expects experts in all layers or in none
}
MODELS = {
    "qwen3_next": Variant("qwen3_next", "qwen3_next", GATED),
    "qwen3_5": Variant("qwen3_5", "qwen3_5", NESTED),
    "mamba2": mamba("mamba2-one-group", **MAMBA),
    "mamba2-groups": mamba("mamba2-plain", **MAMBA),
    "granitemoehybrid": mamba("granitemoehybrid-plain", **HYBRID),
    "granitemoehybrid-groups": mamba("granitemoehybrid-plain", **{**HYBRID, "mamba_n_groups": 2}),
    "falcon_h1": mamba("falcon_h1-plain", **HYBRID),
    "nemotron_h": mamba("nemotron_h-plain", ssm_state_size=128, **EXPERTS, **WIDE, **NO_HEADS),
}


def uncut(name: str, folder: Path) -> Path:
    """Save a model whose config looks like that of published checkpoints."""
    tiny.save(tiny.build(MODELS[name]), folder)
    tiny.tokenizer(("t", "h")).save_pretrained(folder)  # llama.cpp reads none without merges
    write_json(folder / "config.json", as_published(read_json(folder / "config.json")))
    return folder


def cut(model: Path, dim: int, name: str = "key_dim") -> Path:
    """Cut the model to a key dim, or by another name to a state dim, in a folder beside it."""
    out = model.with_name(f"{model.name}-{name}-{dim}")
    slimstate.prune(model, out, method="l1", **{name: dim})
    return out
