"""Kimi Delta Attention of fla: its rule against the gated delta rule and against fla's own."""

from __future__ import annotations

import pytest
import torch

from slimstate.families import kda
from slimstate.kernels.fla_rules import gated_delta_rule
from tiny_model import BY_HEAD_DIM, WITH_SOFTMAX, drawn, variants

VARIANTS = variants(
    "kda",
    BY_HEAD_DIM,
    {
        "plain": {},
        "grouped-values": {"num_v_heads": 4},
        "bounded-gate": {"safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True},
        "hybrid": {"attn": WITH_SOFTMAX, "num_hidden_layers": 3},
    },
)


def test_the_kimi_rule_with_equal_decays_is_the_gated_delta_rule():
    x = drawn()
    expected, state = gated_delta_rule(**x, use_qk_l2norm_in_kernel=True, output_final_state=True)
    x["g"] = x["g"].unsqueeze(-1).expand(-1, -1, -1, 5)
    found, final = kda.kimi_delta_rule(**x, use_qk_l2norm_in_kernel=True, output_final_state=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_kimi_rule_is_that_of_fla(lower_bound):
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    x, rate, bias = drawn(g="channel"), torch.rand(4), torch.randn(20)
    gate = naive_kda_gate if lower_bound is None else naive_kda_lowerbound_gate
    options = {} if lower_bound is None else {"lower_bound": lower_bound}
    expected, state = naive_recurrent_kda(
        *(x[name] for name in "qkv"), gate(x["g"], rate, bias, **options), x["beta"], output_final_state=True
    )
    found, final = kda.kimi_delta_rule(
        **x, A_log=rate, dt_bias=bias, use_gate_in_kernel=True, output_final_state=True, **options
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, state, rtol=1e-4, atol=1e-5)
