"""The rule of Kimi Delta Attention against the gated delta rule and against fla's own."""

from __future__ import annotations

import pytest
import torch

from recurrence_inputs import drawn
from slimstate.kernels.delta_rule import gated_delta_rule
from slimstate.kernels.kda import kimi_delta_rule


def test_the_kimi_rule_with_equal_decays_is_the_gated_delta_rule():
    x = drawn()
    expected, state = gated_delta_rule(**x, use_qk_l2norm_in_kernel=True, output_final_state=True)
    x["g"] = x["g"].unsqueeze(-1).expand(-1, -1, -1, 5)
    found, final = kimi_delta_rule(**x, use_qk_l2norm_in_kernel=True, output_final_state=True)
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
    found, final = kimi_delta_rule(
        **x, A_log=rate, dt_bias=bias, use_gate_in_kernel=True, output_final_state=True, **options
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, state, rtol=1e-4, atol=1e-5)
