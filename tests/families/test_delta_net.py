"""DeltaNet of fla: tiny models with every option, packed sequences, exact ratios in the config."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from slimstate.families import delta_net
from slimstate.families.fla_layout import ratio_for
from slimstate.kernels.delta_rule import recurrence
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
SIZES = [(512, 4), (768, 6), (1000, 5), (1024, 8), (2048, 16), (2560, 20), (4096, 7)]


def test_the_delta_rule_of_packed_sequences_is_that_of_each():
    q, k, v, beta = torch.randn(1, 20, 2, 4), torch.randn(1, 20, 2, 4), torch.randn(1, 20, 2, 3), torch.rand(1, 20, 2)
    ends = torch.tensor([0, 7, 8, 20])
    o, states = delta_net.plain_delta_rule(
        q, k, v, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends, output_final_state=True
    )
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    for n, (a, b) in enumerate([(0, 7), (7, 8), (8, 20)]):
        alone, state = recurrence(*(x[:, a:b] for x in (q, k, v, beta)), scale=0.5)
        torch.testing.assert_close(o[:, a:b], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[n : n + 1], state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("hidden", "heads"), SIZES)
def test_delta_net_configs_are_exact_for_every_key_dim(hidden, heads):
    for key_dim in range(1, 257):
        ratios = {"expand_k": ratio_for(heads * 256, hidden), "expand_v": ratio_for(heads * 8, hidden)}
        resized = delta_net.resize({"hidden_size": hidden, "num_heads": heads, **ratios}, key_dim)
        assert delta_net.mixers(resized)[0].axis.width == key_dim
        # the stock layer rounds, older ones truncate
        assert round(hidden * resized["expand_k"]) == int(hidden * resized["expand_k"]) == key_dim * heads
        assert math.isclose(hidden * resized["expand_k"], key_dim * heads)
