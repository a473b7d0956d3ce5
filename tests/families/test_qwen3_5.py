"""Qwen3.5 and Qwen4, as language models and within vision-language ones."""

import re
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import slimstate
import tiny
from slimstate.checkpoints.reader import Checkpoint
from slimstate.reconstruction.rates import reconstruction_tokens
from slimstate.records.parts import ReconstructionSettings
from tiny_model import GATED_DELTA_HYBRID, KINDS, MIXTURE, seeing, variants

INDEXED = {"layer_types": [kind.replace("full", "indexed") for kind in KINDS], "indexer_n_heads": 2, "hc_lowrank": 8}
INDEXED |= {"indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 16}
QWEN4 = {**MIXTURE, **INDEXED}
VARIANTS = [
    *variants("qwen3_5_text", GATED_DELTA_HYBRID, {"plain": {}, "tied": {"tie_word_embeddings": True}}),
    *variants("qwen3_5_moe_text", MIXTURE, {"plain": {}}),
    *variants("qwen3_5", {}, seeing(GATED_DELTA_HYBRID)),
    *variants("qwen3_5_moe", {}, seeing(MIXTURE)),
    *variants("qwen4_exp_text", QWEN4, {"plain": {}}),
    *variants("qwen4_exp", {}, seeing(QWEN4)),
]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen4_exp"])
def test_a_language_model_alone_and_within_another_have_the_same_layers(name, folders):
    whole, text = (Checkpoint.open(folders[f"{name}{kind}-plain"]) for kind in ("", "_text"))
    for inner, outer in zip(text.mixers, whole.mixers, strict=True):
        assert (inner.axis, inner.path) == (outer.axis, outer.path)
        assert outer.stored_path == str(inner.stored_path).replace("model.", "model.language_model.")
    settings = ReconstructionSettings(steps=10, batch=2, samples=8, length=32, learning_rate=None, seed=0)
    assert reconstruction_tokens(whole, settings) == reconstruction_tokens(text, settings)


def test_a_text_model_with_the_names_of_a_larger_model_is_cut_alike(folders, tmp_path):
    """transformers 5.23 writes these names for text models that it took from larger ones, and reads them."""
    plain = folders["qwen3_5_text-plain"]
    nested = shutil.copytree(plain, tmp_path / "nested", ignore=shutil.ignore_patterns("model*"))
    weights = {re.sub("^model", "model.language_model", name): x for name, x in tiny.read_tensors(plain).items()}
    save_file(weights, nested / "model.safetensors", metadata={"format": "pt"})
    logits = []
    for source in (plain, nested):
        slimstate.prune(source, tmp_path / f"cut-{source.name}", method="l1", key_dim=8, progress=False)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"cut-{source.name}")
        logits.append(model(input_ids=tiny.token_ids()).logits)
    assert torch.equal(*logits)
