"""The rule of gated linear attention against fla's own."""

from __future__ import annotations

import torch

from recurrence_inputs import drawn
from slimstate.kernels.gla import gated_linear_attention


def test_the_rule_is_that_of_fla():
    from fla.ops.gla.naive import naive_recurrent_gla

    x, decay = drawn(time=150, heads=4), -torch.rand(1, 150, 4, 5)
    expected, state = naive_recurrent_gla(x["q"], x["k"], x["v"], decay, output_final_state=True)
    found, final = gated_linear_attention(x["q"], x["k"], x["v"], gk=decay, output_final_state=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final, state, rtol=1e-4, atol=1e-4)
