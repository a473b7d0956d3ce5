"""Every definition, bound and identity of the paper's rank analysis, on random matrices of every shape and rank."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import jacobian

from recurrence_inputs import inputs
from slimstate.core import effective_rank as ranks
from slimstate.core.effective_rank import Memory, condition_number, effective_rank, rank_utilisation, singular_values
from slimstate.kernels.delta_rule import recurrence

EXAMPLES = settings(max_examples=60, deadline=None)


@st.composite
def matrices(draw: st.DrawFn, batch: int = 3) -> torch.Tensor:
    """Batches of matrices up to 8 x 8: of any rank from 1, with a spectrum spread over up to eight decades."""
    rows, columns = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    rank = draw(st.integers(1, min(rows, columns)))
    spread = draw(st.floats(0, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    left, right = (
        torch.linalg.qr(torch.randn(batch, size, size, generator=generator, dtype=torch.float64))[0][..., :rank]
        for size in (rows, columns)
    )
    values = 10 ** (-spread * torch.rand(batch, rank, generator=generator, dtype=torch.float64))
    return (left * values.unsqueeze(-2)) @ right.mT * 10 ** draw(st.floats(-6, 6))


def vectors(like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*like.shape[:-2], like.shape[-1], generator=generator, dtype=torch.float64)


@EXAMPLES
@given(matrices())
def test_effective_rank_lies_between_one_and_the_rank(matrix):
    values = singular_values(matrix)
    er = effective_rank(values)
    direct = matrix.square().sum((-2, -1)) / torch.linalg.matrix_norm(matrix, ord=2).square()
    torch.testing.assert_close(er, direct, rtol=1e-9, atol=0)
    assert bool((er >= 1 - 1e-12).all())
    assert bool((er <= ranks.algebraic_rank(values) + 1e-9).all())
    torch.testing.assert_close(rank_utilisation(values) * min(matrix.shape[-2:]), er)


@EXAMPLES
@given(matrices(), st.floats(0.1, 10))
def test_effective_rank_ignores_transposition_rotation_and_scale(matrix, scale):
    size = matrix.shape[-2]
    rotation = torch.linalg.qr(vectors(matrix.new_zeros(1, 1, size * size), 0).view(size, size))[0]
    er = effective_rank(singular_values(matrix))
    for same in (matrix.mT, rotation @ matrix, -scale * matrix):
        torch.testing.assert_close(effective_rank(singular_values(same)), er, rtol=1e-8, atol=1e-8)


@EXAMPLES
@given(matrices())
def test_the_condition_number_bounds_rank_over_effective_rank(matrix):
    """kappa^2(A) >= rank(A) / er(A), and 1 / u(A) where A has full rank."""
    values = singular_values(matrix)
    er, rank, kappa = effective_rank(values), ranks.algebraic_rank(values), condition_number(values)
    assert bool((kappa.square() >= rank / er * (1 - 1e-9)).all())
    full = rank == values.shape[-1]
    assert bool((kappa[full].square() >= 1 / rank_utilisation(values)[full] * (1 - 1e-9)).all())


def test_zero_and_rank_deficient_matrices():
    zero = singular_values(torch.zeros(2, 4, 3))
    assert effective_rank(zero).tolist() == rank_utilisation(zero).tolist() == [0, 0]
    assert ranks.algebraic_rank(zero).tolist() == [0, 0]
    assert condition_number(zero).tolist() == [math.inf, math.inf]
    memory = Memory.of(torch.zeros(4, 3))
    ones = torch.ones(3)
    bounds = memory.amplification_bounds(ones, ones)
    assert (float(bounds.lower), float(bounds.upper)) == (0, math.inf)
    rank_one = singular_values(torch.ones(5, 4))
    assert float(effective_rank(rank_one)) == pytest.approx(1)
    assert int(ranks.algebraic_rank(rank_one)) == 1
    assert float(condition_number(rank_one)) == math.inf
    assert float(effective_rank(singular_values(torch.eye(6)))) == pytest.approx(6)
    assert float(ranks.state_bound(torch.zeros(2, 3), torch.zeros(3, 3))) == 0


def test_the_condition_number_of_a_gram_matrix_is_that_of_the_matrix():
    x = torch.randn(5, 40, 6, dtype=torch.float64) * torch.logspace(0, -3, 6, dtype=torch.float64)
    expected = condition_number(singular_values(x))
    torch.testing.assert_close(ranks.gram_condition_number(x.mT @ x), expected, rtol=1e-6, atol=0)
    assert float(ranks.gram_condition_number(torch.ones(3, 3))) == math.inf


def key_bound(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """nu(V) / kappa^2(K) from the definitions: nu(V) = er(P V), P the projection on the column space of the keys."""
    u, s, _ = torch.linalg.svd(keys, full_matrices=False)
    inside = torch.arange(s.shape[-1]) < ranks.algebraic_rank(s).unsqueeze(-1)
    nu = effective_rank(singular_values((u * inside.unsqueeze(-2)).mT @ values))
    return nu * (torch.where(inside, s, math.inf).amin(-1) / s[..., 0]).square()


@EXAMPLES
@given(matrices(), st.integers(0, 2**31), st.integers(1, 6))
def test_the_conditioning_of_the_keys_bounds_the_effective_rank(keys, seed, value_dim):
    """nu(V) / kappa^2(K) <= er(V'K), for keys of any rank."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*keys.shape[:-1], value_dim, generator=generator, dtype=torch.float64)
    bound = key_bound(keys, values)
    assert bool((bound <= effective_rank(singular_values(values.mT @ keys)) * (1 + 1e-6)).all())
    assert bool((bound > 0).all())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("time", [3, 6, 40])
def test_the_bound_is_exact_for_the_delta_rule_with_its_updates_as_values(gated, time):
    """From the state and the keys' Gram matrix alone, what the recurrence's own updates give."""
    (_, k, v, beta, *g), _ = inputs(2, time, 3, 1, 6, 5, gated)
    k = torch.nn.functional.normalize(k, dim=-1)

    def after(t):
        return recurrence(*(x[:, :t] for x in (k, k, v, beta, *g)), scale=1.0)[1]

    state, keys = after(time), k.transpose(1, 2)
    earlier = torch.stack([torch.zeros_like(state), *(after(t) for t in range(1, time))], dim=1)
    decay = g[0].exp() if g else torch.ones_like(beta)
    recalled = torch.einsum("bthkv,bthk->bthv", earlier * decay[..., None, None], k)
    later = torch.cat([decay[:, 1:], torch.ones_like(decay[:, :1])], 1).flip(1).cumprod(1).flip(1)
    updates = (beta * later).unsqueeze(-1) * (v - recalled)
    torch.testing.assert_close(torch.einsum("bthv,bthk->bhkv", updates, k), state)
    from_state = ranks.state_bound(state.mT, keys.mT @ keys)
    torch.testing.assert_close(from_state, key_bound(keys, updates.transpose(1, 2)), rtol=1e-6, atol=1e-9)
    assert bool((from_state <= effective_rank(singular_values(state)) * (1 + 1e-9)).all())


@EXAMPLES
@given(matrices(), st.integers(0, 2**31))
def test_the_effective_rank_governs_the_retrieval_error(state, seed):
    """delta / sqrt(er) <= R <= sqrt(er) / gamma, with R from two readings of the memory."""
    memory, query, noise = Memory.of(state), vectors(state, seed), vectors(state, seed + 1)
    clean, noisy = (torch.einsum("...vk,...k->...v", state, x) for x in (query, query + noise))
    error = (noisy - clean).norm(dim=-1) / clean.norm(dim=-1) * query.norm(dim=-1) / noise.norm(dim=-1)
    ratio = memory.amplification(query, noise)
    torch.testing.assert_close(ratio, error, rtol=1e-5, atol=1e-9)
    assert bool(memory.amplification_bounds(query, noise).hold(ratio).all())
    assert bool(memory.condition_bounds().hold(ratio).all())


def test_the_bounds_are_sharp_on_a_memory_of_rank_one():
    memory = Memory.of(torch.outer(torch.randn(5), torch.randn(4)))
    query, noise = torch.randn(4), torch.randn(4)
    bounds, ratio = memory.amplification_bounds(memory.principal, noise), memory.amplification(memory.principal, noise)
    torch.testing.assert_close(bounds.lower, ratio)
    bounds, ratio = memory.amplification_bounds(query, memory.principal), memory.amplification(query, memory.principal)
    torch.testing.assert_close(bounds.upper, ratio)
    torch.testing.assert_close(memory.expected_bounds(query).lower, memory.expected_error(memory.principal))


@EXAMPLES
@given(matrices(), st.integers(0, 2**31))
def test_the_expected_error_lies_between_its_bounds(state, seed):
    memory, query = Memory.of(state), vectors(state, seed)
    error = memory.expected_error(query)
    assert bool(memory.expected_bounds(query).hold(error).all())
    assert bool(memory.expected_condition_bounds().hold(error).all())


def test_the_expected_error_is_what_sampling_gives():
    torch.manual_seed(0)
    state, query = torch.randn(6, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    noise = torch.randn(400_000, 5, dtype=torch.float64)
    sampled = (noise @ state.mT).norm(dim=-1).mean() / (state @ query).norm() * query.norm()
    assert float(Memory.of(state).expected_error(query)) == pytest.approx(float(sampled), rel=3e-3)
    identity = Memory.of(torch.eye(7, dtype=torch.float64))
    assert float(identity.expected_error(torch.ones(7))) == pytest.approx(ranks.mean_norm(7), rel=1e-12)


def test_a_wide_state_has_no_finite_condition_bound():
    """The paper's kappa bounds need K <= V: a wider state forgets some query whatever its singular values are."""
    memory = Memory.of(torch.tensor([[1.0, 0.0]]))
    forgotten, seen = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    assert float(memory.amplification(seen, forgotten)) == 0  # not within 1 / kappa = 1
    assert float(memory.kappa) == math.inf
    assert bool(memory.condition_bounds().hold(memory.amplification(seen, forgotten)))


@EXAMPLES
@given(matrices(batch=1), st.integers(0, 2**31))
def test_the_gradient_of_the_query_projection_is_as_conditioned_as_the_state(states, seed):
    """d o / d vec(W_Q') = x' (x) S for o = S W_Q' x, and so kappa(d o / d vec(W_Q')) = kappa(S)."""
    state = states[0]
    x = torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weight = torch.zeros(3, state.shape[-1], dtype=torch.float64)  # q = W_Q' x
    derived = jacobian(lambda w: state @ (w.mT @ x), weight).flatten(1)
    torch.testing.assert_close(torch.kron(x, state), derived)
    if state.shape[0] <= state.shape[1]:
        ours, theirs = (condition_number(singular_values(m)) for m in (derived, state))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
