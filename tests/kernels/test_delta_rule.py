"""The chunked form is the recurrence: values, final state and gradients; packed sequences are each by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from recurrence_inputs import inputs
from slimstate.kernels.delta_rule import chunked, delta_rule, plain_delta_rule, recurrence


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("time", "chunk"), [(1, 64), (5, 64), (64, 64), (130, 64), (33, 16)])
def test_chunks_give_the_values_and_gradients_of_the_recurrence(gated, time, chunk):
    tensors, state = inputs(2, time, 2, 2, 6, 5, gated)
    expected = recurrence(*tensors, scale=0.4, state=state)
    found = chunked(*tensors, scale=0.4, state=state, chunk=chunk)
    weights = [torch.randn_like(x) for x in expected]
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(pair, weights, strict=True)), [*tensors, state])
        for pair in (expected, found)
    ]
    for a, b in zip((*expected, *gradients[0]), (*found, *gradients[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gated", [False, True])
def test_chunks_erase_by_another_vector_as_the_recurrence_does(gated):
    (q, k, v, beta, *g), state = inputs(2, 150, 2, 2, 6, 5, gated)
    p = F.normalize(torch.randn_like(k), dim=-1).requires_grad_()
    expected = recurrence(q, k, v, beta, *g, scale=0.4, state=state, erase=p)
    found = chunked(q, k, v, beta, *g, scale=0.4, state=state, erase=p)
    wanted = [q, k, v, beta, *g, p, state]
    gradients = [torch.autograd.grad(sum(x.square().sum() for x in pair), wanted) for pair in (expected, found)]
    for a, b in zip((*expected, *gradients[0]), (*found, *gradients[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 90), st.integers(1, 89), st.booleans(), st.integers(1, 3), st.integers(0, 99))
def test_a_state_carries_a_sequence_across_any_cut(time, cut, gated, groups, seed):
    tensors, _ = inputs(1, time + cut, 2, groups, 4, 3, gated, seed)
    whole, last = delta_rule(*tensors, scale=1.0)
    first, state = delta_rule(*(x[:, :cut] for x in tensors), scale=1.0)
    second, end = delta_rule(*(x[:, cut:] for x in tensors), scale=1.0, state=state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(end, last, rtol=1e-10, atol=1e-10)


def test_strong_decay_does_not_overflow():
    tensors, _ = inputs(1, 100, 1, 1, 4, 4, True)
    tensors[4] = torch.full_like(tensors[4], -80.0)
    for erase in (None, tensors[1] / 2):
        forms = chunked(*tensors, scale=1.0, erase=erase), recurrence(*tensors, scale=1.0, erase=erase)
        for a, b in zip(*forms, strict=True):
            assert a.isfinite().all()
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_delta_rule_of_packed_sequences_is_that_of_each():
    q, k, v, beta = torch.randn(1, 20, 2, 4), torch.randn(1, 20, 2, 4), torch.randn(1, 20, 2, 3), torch.rand(1, 20, 2)
    ends = torch.tensor([0, 7, 8, 20])
    o, states = plain_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends, output_final_state=True)
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    for n, (a, b) in enumerate([(0, 7), (7, 8), (8, 20)]):
        alone, state = recurrence(*(x[:, a:b] for x in (q, k, v, beta)), scale=0.5)
        torch.testing.assert_close(o[:, a:b], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[n : n + 1], state, rtol=1e-4, atol=1e-5)
