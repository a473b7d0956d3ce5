"""The delta product against fla's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from recurrence_inputs import drawn
from slimstate.kernels.delta_product import delta_product


def test_a_delta_product_is_several_updates_for_each_reading():
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product

    x, many = drawn(heads=4), drawn(time=60, heads=4)
    updates = {"k": F.normalize(many["k"], dim=-1), "v": many["v"], "beta": many["beta"]}
    expected, state = naive_recurrent_gated_delta_product(
        q=x["q"], **updates, g=x["g"], scale=0.5, output_final_state=True, num_householder=3
    )
    found, final = delta_product(q=x["q"], **updates, g=x["g"], scale=0.5, output_final_state=True, num_householder=3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final, state, rtol=1e-4, atol=1e-4)
