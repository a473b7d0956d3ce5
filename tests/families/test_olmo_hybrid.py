"""OLMo-Hybrid: convolutions that files keep in parts and the running model joins."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimstate.checkpoints.reader import Checkpoint
from slimstate.system.errors import ModelError
from tiny_model import GATED_DELTA_HYBRID, build, tokenizer, variants

VARIANTS = variants("olmo_hybrid", GATED_DELTA_HYBRID, {"plain": {}})


def as_published(model: torch.nn.Module, folder) -> None:
    """Files have the convolutions apart; save_pretrained splits them into equal parts, which is wrong."""
    sizes = [2 * 24, 2 * 24, 4 * 12]
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, whole in model.state_dict().items():
            if name.endswith(".conv1d.weight"):
                parts = dict(zip("qkv", whole.split(sizes), strict=True))
                for letter, part in parts.items():
                    stored = name.replace(".conv1d.", f".{letter}_conv1d.")
                    if stored in tensors:
                        tensors[stored] = part.clone().contiguous()
        save_file(tensors, path, metadata={"format": "pt"})


def test_convolutions_that_save_pretrained_split_wrongly_are_refused(tmp_path):
    model = build(VARIANTS[0], linear_value_head_dim=20)
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="splits joined tensors into equal parts"):
        _ = Checkpoint.open(tmp_path / "model").mixers
