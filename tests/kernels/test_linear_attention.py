"""Linear attention is masked attention without a softmax."""

from __future__ import annotations

import pytest
import torch

from recurrence_inputs import drawn
from slimstate.kernels.linear_attention import linear_attention


@pytest.mark.parametrize("normalize", [True, False])
def test_linear_attention_is_masked_attention_without_a_softmax_and_goes_on_from_its_state(normalize):
    x = drawn(time=150, heads=4)
    q, k, v = x["q"].abs(), x["k"].abs(), x["v"]
    weights = torch.einsum("bthk,bshk->bhts", q, k).tril() * 5**-0.5
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.einsum("bhts,bshv->bthv", weights, v)
    options = {"normalize": normalize, "output_final_state": True}
    found, _ = linear_attention(q, k, v, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    _, state = linear_attention(q[:, :70], k[:, :70], v[:, :70], **options)
    rest, _ = linear_attention(q[:, 70:], k[:, 70:], v[:, 70:], initial_state=state, **options)
    torch.testing.assert_close(rest, expected[:, 70:], rtol=1e-4, atol=1e-4)
