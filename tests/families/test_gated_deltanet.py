"""Gated DeltaNet of fla: tiny models with every option, exact ratios in the config."""

import math

import pytest

from slimstate.families import FAMILIES
from slimstate.families.fla_layout import ratio_for
from tiny_model import WITH_SOFTMAX, variants

VARIANTS = variants(
    "gated_deltanet",
    {"head_dim": 24, "expand_v": 1.5},
    {
        "plain": {},
        "grouped-values": {"num_v_heads": 4},
        "no-gate": {"use_gate": False},
        "sigmoid-gate": {"output_gate_activation": "sigmoid"},
        "no-conv": {"use_short_conv": False},
        "negative": {"allow_neg_eigval": True},
        "tied": {"tie_word_embeddings": True},
        "hybrid": {"attn": [WITH_SOFTMAX], "num_hidden_layers": 3},
        "odd-value-dim": {"head_dim": 49, "expand_v": 33.0000001 / 49, "num_v_heads": 2},
    },
)


@pytest.mark.parametrize("value_dim", [24, 64, 96, 100, 128, 192, 256, 512])
def test_gated_deltanet_configs_are_exact_for_every_key_dim(value_dim):
    family = FAMILIES["gated_deltanet"]
    config = {"model_type": "gated_deltanet", "head_dim": 256, "expand_v": ratio_for(value_dim, 256), "num_heads": 3}
    for key_dim in range(1, 257):
        resized = family.resize(config, key_dim)
        mixer = family.mixers(resized)[0]
        assert (mixer.axis.width, mixer.value_dim) == (key_dim, value_dim)
        # what the stock layer computes and checks
        assert int(resized["head_dim"] * resized["expand_v"]) == value_dim
        assert math.isclose(3 * resized["head_dim"] * resized["expand_v"], 3 * value_dim, rel_tol=1e-5)
