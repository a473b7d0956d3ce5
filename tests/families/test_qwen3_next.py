"""Qwen3-Next: what lies in its files beside the model."""

import torch
from safetensors.torch import load_file, save_file

import slimstate
from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.load import load
from tiny_model import MIXTURE, build, tokenizer, variants

VARIANTS = variants("qwen3_next", MIXTURE, {"plain": {}, "equal-heads": {"linear_num_key_heads": 4}})


def test_what_no_class_loads_is_kept_byte_for_byte(tmp_path):
    """Heads for speculative decoding lie in the files beside the model; no class of transformers reads them."""
    folder = tmp_path / "model"
    build(VARIANTS[0]).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {
        "mtp.fc.weight": torch.randn(8, 8),
        "mtp.layers.0.self_attn.q_proj.weight": torch.randn(4, 4).bfloat16(),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    slimstate.prune(folder, tmp_path / "cut", method="l1", key_dim=8)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "cut"))
    cut = {mixer.name_of(slot) for mixer in Checkpoint.open(folder).mixers for slot in mixer.axis.slots}
    assert before.keys() == after.keys()
    for name in before.keys() - cut:
        assert torch.equal(*(part[name].contiguous().view(torch.uint8) for part in (before, after))), name
    assert all(before[name].shape != after[name].shape for name in cut)
    load(tmp_path / "cut", device="cpu")
