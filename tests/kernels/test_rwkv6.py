"""The rule of RWKV-6 against fla's own, and packed sequences."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from recurrence_inputs import drawn
from slimstate.kernels.rwkv6 import rwkv6_rule, token_shift


def arguments(time: int) -> dict[str, torch.Tensor]:
    x = drawn(time=time, heads=4, g="channel")
    return {"r": x["q"], "k": x["k"], "v": x["v"], "w": -x["g"].exp(), "u": torch.randn(4, 5)}


@pytest.mark.parametrize("start", [False, True])
def test_the_rule_is_that_of_fla(start):
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    x, state = arguments(40), torch.randn(1, 4, 5, 3) if start else None
    by_head = [x[name].transpose(1, 2) for name in "rkvw"]
    expected, final = naive_recurrent_rwkv6(*by_head, x["u"], 0.7, state, output_final_state=True)
    found, end = rwkv6_rule(**x, scale=0.7, initial_state=state, output_final_state=True)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end, final, rtol=1e-4, atol=1e-4)


def test_packed_sequences_are_each_by_itself():
    x, ends = arguments(20), [0, 7, 8, 20]
    found, states = rwkv6_rule(**x, cu_seqlens=torch.tensor(ends), output_final_state=True)
    shifted = token_shift(x["v"].flatten(2), torch.tensor(ends))
    for n, (a, b) in enumerate(pairwise(ends)):
        piece = {name: tensor if name == "u" else tensor[:, a:b] for name, tensor in x.items()}
        alone, state = rwkv6_rule(**piece, output_final_state=True)
        torch.testing.assert_close(found[:, a:b], alone)
        torch.testing.assert_close(states[n : n + 1], state)
        torch.testing.assert_close(shifted[:, a:b], token_shift(x["v"].flatten(2)[:, a:b]))
