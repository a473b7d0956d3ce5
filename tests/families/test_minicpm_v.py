"""MiniCPM-V and MiniCPM-OCR: the language model is run by the class of Qwen3.5, and is the one that the whole runs."""

import pytest
import torch

import slimstate
from slimstate.models.load import load
from slimstate.models.prepare import prepare
from tiny_model import COMMON, GATED_DELTA_HYBRID, build, token_ids, variants

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 32, "patch_size": 8}
OPTIONS = {"vision_config": VISION, "insert_layer_id": 0, "text_config": {**COMMON, **GATED_DELTA_HYBRID}}
VARIANTS = [
    *variants("minicpmv4_6", OPTIONS, {"plain": {}}),
    *variants("minicpmv4_7", OPTIONS, {"plain": {}}),
    *variants("minicpm_ocr", OPTIONS, {"plain": {"tie_word_embeddings": False}, "tied": {}}),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_language_model_that_is_cut_is_that_of_the_whole(variant, folders):
    whole, ids = build(variant), token_ids()
    language = load(folders[variant.name], device="cpu").model
    assert type(language).__name__ == "Qwen3_5ForCausalLM"
    with torch.inference_mode():
        expected = whole(input_ids=ids, use_cache=False).logits
        assert torch.equal(language(input_ids=ids, use_cache=False).logits, expected)


def test_a_card_names_the_class_that_loads_the_whole(folders, tmp_path):
    from transformers import AutoModelForImageTextToText

    slimstate.prune(folders["minicpmv4_6-plain"], tmp_path / "cut", method="l1", key_dim=8)
    card = (tmp_path / "cut" / "README.md").read_text()
    assert "AutoModelForImageTextToText.from_pretrained" in card
    assert "CausalLM" not in card
    prepare("minicpmv4_6")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "cut")
    ids = token_ids(1, 20)
    with torch.inference_mode():
        tokens = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
        predicted = model(input_ids=tokens, use_cache=False).logits.argmax(-1)
    assert torch.equal(predicted[:, 19:-1], tokens[:, 20:])
