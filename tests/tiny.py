"""Tiny random models of every family and option, as folders that look like real checkpoints.

Every file under `families/` has those of its family as VARIANTS; its function `as_published` rewrites files where real
checkpoints differ from what `save_pretrained` writes.
"""

import importlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from slimstate.families import FAMILIES
from slimstate.models.load import Runtime
from tiny_model import WITH_SOFTMAX, Variant, build, text, token_ids, tokenizer

__all__ = ["WITH_SOFTMAX", "Variant", "build", "text", "token_ids", "tokenizer"]  # of a model, whatever its family

FILES = sorted(path.stem for path in (Path(__file__).parent / "families").glob("test_*.py"))
MODULES = [importlib.import_module(f"families.{name}") for name in FILES]
VARIANTS: dict[str, Variant] = {variant.name: variant for module in MODULES for variant in module.VARIANTS}
AS_PUBLISHED = {
    variant.model_type: module.as_published
    for module in MODULES
    if hasattr(module, "as_published")
    for variant in module.VARIANTS
}
PLAIN = ("delta_net-plain", "gated_deltanet-plain")
OF_FLA = tuple(name for name, variant in VARIANTS.items() if FAMILIES[variant.model_type].library == "fla")
OF_TRANSFORMERS = tuple(name for name in VARIANTS if name not in OF_FLA)
EVERY_PLAIN = tuple(name for name in VARIANTS if name.endswith("-plain"))
# without families whose language model is that of another family, and without language models that another one holds
LANGUAGES = {name: FAMILIES[VARIANTS[name].model_type].language for name in EVERY_PLAIN}
DISTINCT = tuple(name for name in EVERY_PLAIN if LANGUAGES[name] is None and "_text-" not in name)
VALUES_ONLY = tuple(  # whose keys cannot be cut
    name for name, variant in VARIANTS.items() if FAMILIES[variant.model_type].key_refusal(variant.options)
)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 300}
SHAPES = {  # configs of models that train in a second
    "delta_net": {**SIZES, "model_type": "delta_net", "expand_k": 0.75},
    "gated_deltanet": {**SIZES, "model_type": "gated_deltanet", "head_dim": 24, "expand_v": 1.5},
}


def write_shape(path: Path, name: str) -> Path:
    path.write_text(json.dumps(SHAPES[name]))
    return path


def save(model: torch.nn.Module, folder: Path, shard_size: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard_size)
    if model.config.model_type in AS_PUBLISHED:
        AS_PUBLISHED[model.config.model_type](model, folder)
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes").mkdir(exist_ok=True)
    (folder / "notes" / "origin.md").write_text("a file that is not a weight")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def runtime(model: torch.nn.Module, words: object = None) -> Runtime:
    return Runtime(model=model, tokenizer=words, device=torch.device("cpu"), dtype=torch.float32, kernels="")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
