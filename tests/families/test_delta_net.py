"""DeltaNet of fla: tiny models with every option, exact ratios in the config."""

import math

import pytest

from slimstate.families import FAMILIES
from slimstate.families.fla_layout import ratio_for
from tiny_model import WITH_SOFTMAX, variants

VARIANTS = variants(
    "delta_net",
    {"expand_k": 0.75, "expand_v": 1.0},
    {
        "plain": {},
        "gate": {"use_gate": True},
        "no-conv": {"use_short_conv": False},
        "sum-norm": {"qk_norm": "sum"},
        "relu": {"qk_activation": "relu"},
        "elu": {"qk_activation": "elu", "qk_norm": "sum"},
        "identity": {"qk_activation": "identity"},
        "negative": {"allow_neg_eigval": True},
        "no-beta": {"use_beta": False},
        "tied": {"tie_word_embeddings": True},
        "hybrid": {"attn": WITH_SOFTMAX, "num_hidden_layers": 3},
        "unfused": {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False},
        "powlu": {"hidden_act": "powlu", "fuse_linear_cross_entropy": True, "fuse_cross_entropy": False},
        "residuals": {"attnres_block_size": 2},
        "wide-keys": {"expand_k": 1.5, "conv_size": 3},
    },
)
DELTA_NET = FAMILIES["delta_net"]
SIZES = [(512, 4), (768, 6), (1000, 5), (1024, 8), (2048, 16), (2560, 20), (4096, 7)]


@pytest.mark.parametrize(("hidden", "heads"), SIZES)
def test_delta_net_configs_are_exact_for_every_key_dim(hidden, heads):
    for key_dim in range(1, 257):
        ratios = {"expand_k": ratio_for(heads * 256, hidden), "expand_v": ratio_for(heads * 8, hidden)}
        resized = DELTA_NET.resize({"hidden_size": hidden, "num_heads": heads, **ratios}, key_dim)
        assert DELTA_NET.mixers(resized)[0].axis.width == key_dim
        # the stock layer rounds, older ones truncate
        assert round(hidden * resized["expand_k"]) == int(hidden * resized["expand_k"]) == key_dim * heads
        assert math.isclose(hidden * resized["expand_k"], key_dim * heads)
