"""The rule of Comba against fla's own, and step by step."""

from __future__ import annotations

import torch

from recurrence_inputs import drawn
from slimstate.kernels.comba import comba_rule


def test_the_rule_is_that_of_fla():
    from fla.ops.comba.naive import naive_chunk_comba  # which agrees with its kernels; naive_recurrent_comba does not

    x = drawn(time=150, heads=4)
    p = x["k"] * 0.3
    expected, state = naive_chunk_comba(**x, p=p, output_final_state=True)
    found, final = comba_rule(**x, p=p, output_final_state=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(final, state, rtol=1e-3, atol=1e-3)


def test_a_step_erases_from_the_state_before_its_decay():
    x = {name: tensor.double() for name, tensor in drawn(time=1, heads=4).items()}
    p, before = x["k"] * 0.3, torch.randn(1, 4, 5, 3, dtype=torch.float64)
    recalled = torch.einsum("bhkv,bthk->bthv", before, p)
    update = x["beta"].unsqueeze(-1) * (x["v"] - recalled)
    expected = before * x["g"][:, 0].exp()[..., None, None] + torch.einsum("bthk,bthv->bhkv", x["k"], update)
    o, final = comba_rule(**x, p=p, scale=1.0, initial_state=before, output_final_state=True)
    torch.testing.assert_close(final, expected)
    torch.testing.assert_close(o, torch.einsum("bhkv,bthk->bthv", expected, x["q"]))
