"""Mamba-2 and its hybrids: what logits are multiplied by, fla's class of the same name."""

import pytest
import torch

import slimstate
from slimstate.families import FAMILIES
from slimstate.models.load import load, states_before_head
from tiny_model import SOFTMAX, build, token_ids, variants

HYBRID = {**SOFTMAX, "num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2}
HYBRID |= {"mamba_d_state": 24, "mamba_chunk_size": 16}
GRANITE = {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, "num_experts_per_tok": 2}
VARIANTS = [
    *variants(
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "chunk_size": 16},
        {"plain": {}, "biased": {"use_bias": True}, "no-conv-bias": {"use_conv_bias": False}}
        | {"one-group": {"n_groups": 1}},
    ),
    *variants("bamba", HYBRID | {"attn_layer_indices": [1]}, {"plain": {}, "biased": {"mamba_proj_bias": True}}),
    *variants("falcon_h1", {**HYBRID, "mamba_d_ssm": 128}, {"plain": {}}),
    *variants("granitemoehybrid", {**HYBRID, **GRANITE, "shared_intermediate_size": 32}, {"plain": {}}),
    *variants(
        "zamba2",
        {"n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 24, "chunk_size": 16, "num_hidden_layers": 3}
        | {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_attention_heads": 4, "num_key_value_heads": 4}
        | {"adapter_rank": 4, "use_mem_rope": True},
        {"plain": {}},
    ),
    *variants(
        "nemotron_h",
        {**SOFTMAX, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "chunk_size": 16}
        | {"layers_block_type": ["mamba", "attention", "moe", "mlp", "mamba"], "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
        {"plain": {}},
    ),
]
SCALED = [("granitemoehybrid", "logits_scaling"), ("falcon_h1", "lm_head_multiplier")]


def test_importing_fla_does_not_change_which_mamba2_runs(folders):
    slimstate.prepare_fla()
    from transformers import AutoModelForCausalLM

    folder = folders["mamba2-plain"]
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__module__.startswith("fla.")
    assert type(load(folder, device="cpu").model).__module__.startswith("transformers.")


@pytest.mark.parametrize(("model_type", "field"), SCALED)
def test_models_that_scale_their_logits_do_so_in_the_loss(model_type, field):
    (variant,) = (variant for variant in VARIANTS if variant.name == f"{model_type}-plain")
    model, ids = build(variant, **{field: 3.0}), token_ids(2, 40)
    with torch.no_grad():
        computed = states_before_head(model, ids) @ model.get_output_embeddings().weight.T
        expected = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_softmax_stands_beside_the_state_only_in_some_hybrids(variant):
    """In every layer of Falcon-H1, in the hybrid layers of Zamba2."""
    config = {"model_type": variant.model_type, "num_hidden_layers": 2, "hidden_size": 64, **variant.options}
    family = FAMILIES[variant.model_type]
    both = family.softmax_layers(config) & {mixer.layer for mixer in family.mixers(config)}
    assert both == {"falcon_h1": {0, 1, 2}, "zamba2": {1}}.get(variant.model_type, set())
