"""Kimi-Linear and GLM-5-Next: one width for keys, values and the bottlenecks of the gates."""

import pytest
import torch

import slimstate
import tiny
from slimstate.checkpoints.reader import Checkpoint
from slimstate.families import FAMILIES
from slimstate.system.errors import ModelError
from tiny_model import COMMON, KINDS, VISION, build, variants

SIZES = {
    "num_hidden_layers": 3, "layer_types": KINDS, "num_attention_heads": 2, "num_key_value_heads": 2,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "linear_head_dim": 24,
    "linear_num_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
GLM = {
    **COMMON, **SIZES, "qk_rope_head_dim": 0, "q_lora_rank": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2,
    "hc_mult": 2, "pad_token_id": 0,
}  # fmt: skip
GLM_VISION = {**VISION, "image_size": 8, "projection_intermediate_size": 32}
VARIANTS = [
    *variants("kimi_linear", SIZES, {"plain": {}}),
    *variants("glm5_next", {"text_config": GLM, "vision_config": GLM_VISION}, {"plain": {}}),
]


def test_published_configs_have_their_sizes_inside():
    inner = {"head_dim": 32, "num_heads": 4, "kda_layers": [1, 2, 4], "full_attn_layers": [3]}
    config = {"model_type": "kimi_linear", "num_hidden_layers": 4, "linear_attn_config": inner}
    family = FAMILIES["kimi_linear"]
    assert [mixer.layer for mixer in family.mixers(config)] == [0, 1, 3]
    resized = family.resize(config, 16)
    assert resized["linear_attn_config"] == {**inner, "head_dim": 16}
    assert (family.sizes(resized).width, family.sizes(resized).value_dim) == (16, 16)


def test_the_default_layers_of_glm_are_those_of_its_stock_config():
    from transformers import Glm5NextTextConfig

    family = FAMILIES["glm5_next"]
    kinds = Glm5NextTextConfig().layer_types
    assert family.layers(family.stock_config) == [kind.replace("indexed", "full") for kind in kinds]
    with pytest.raises(ModelError, match="has no text_config"):
        family.mixers({"model_type": "glm5_next"})


@pytest.mark.slow
def test_bottlenecks_of_low_rank_are_cut_exactly_and_others_say_what_they_lose(tmp_path):
    model = build(VARIANTS[0])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("f_a_proj.weight", "g_a_proj.weight")):
                weight[8:] = 0
    folder = tiny.save(model, tmp_path / "model")
    cut = slimstate.prune(folder, tmp_path / "cut", state_dim=12, method="random")
    assert "lose 0.00% of their squared weights" in cut.correction
    assert "lose 0.00%" not in slimstate.prune(folder, state_dim=4, method="random").correction
    with pytest.raises(ModelError, match="one width for keys and values, got key dim 12 and value dim 8: use"):
        slimstate.prune(folder, key_dim=12, value_dim=8, method="random")


@pytest.mark.slow
def test_reconstruction_lowers_the_error_of_narrow_bottlenecks(text_file, tmp_path):
    folder = tiny.save(build(VARIANTS[0]), tmp_path / "model")
    options = slimstate.ReconstructOptions(steps=4, batch=2, samples=8, length=32, learning_rate=3e-3)
    cut = slimstate.prune(folder, tmp_path / "cut", state_dim=12, data=text_file, reconstruct=options)
    assert cut.reconstruction is not None
    assert all(layer.held_out_after < layer.held_out_before for layer in cut.reconstruction.layers)
    assert Checkpoint.open(tmp_path / "cut").mixers[0].value_dim == 12
