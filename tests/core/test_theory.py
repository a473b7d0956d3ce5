"""The dynamical view and the regression view of docs/THEORY.md, each against an oracle."""

import pytest
import torch
import torch.nn.functional as F

from slimstate.core.effective_rank import effective_rank, rank_utilisation, singular_values
from slimstate.kernels.delta_rule import recurrence
from slimstate.selectors.rotations import principal_directions, random_directions


def stream(time: int, key_dim: int, value_dim: int, seed: int = 0):
    """Keys of length one, values and strengths."""
    generator = torch.Generator().manual_seed(seed)
    keys = F.normalize(torch.randn(time, key_dim, generator=generator, dtype=torch.float64), dim=-1)
    values = torch.randn(time, value_dim, generator=generator, dtype=torch.float64)
    return keys, values, torch.rand(time, generator=generator, dtype=torch.float64)


def after(keys, values, beta, queries=None, log_decay=None, state=None):
    """Outputs [T, V] and the state [V, K] of slimstate's recurrence for one head."""
    q = keys if queries is None else queries
    rest = [] if log_decay is None else [log_decay.view(1, -1, 1)]
    start = None if state is None else state.mT[None, None]
    lifted = (x.unsqueeze(0).unsqueeze(2) for x in (q, keys, values))
    o, last = recurrence(*lifted, beta.view(1, -1, 1), *rest, scale=1.0, state=start)
    return o[0, :, 0], last[0, 0].mT


def regressed(keys, values, beta):
    """The state [V, K] after a step along autograd's gradient of half the squared error for one token after another."""
    state = torch.zeros(values.shape[1], keys.shape[1], dtype=torch.float64)
    for k, v, step in zip(keys, values, beta, strict=True):
        state.requires_grad_(True)
        loss = (v - state @ k).square().sum() / 2
        state = (state - step * torch.autograd.grad(loss, state)[0]).detach()
    return state


def test_an_euler_step_of_the_regression_flow_is_the_delta_rule():
    keys, values, beta = stream(30, 5, 3)
    torch.testing.assert_close(after(keys, values, beta)[1], regressed(keys, values, beta))


def test_a_step_is_the_exact_flow_for_another_time():
    """dS/dt = (v - S k) k' solved by the matrix exponential of the affine system, for t = -log(1 - beta)."""
    keys, values, beta = stream(1, 4, 3)
    start = torch.randn(3, 4, dtype=torch.float64)
    k, v, time = keys[0], values[0], -torch.log1p(-beta[0])
    system = torch.zeros(5, 5, dtype=torch.float64)  # of one row of S with a one beside it
    expected = torch.empty_like(start)
    for i in range(3):
        system[:4, :4], system[:4, 4] = -torch.outer(k, k), v[i] * k
        expected[i] = (torch.matrix_exp(time * system) @ torch.cat([start[i], torch.ones(1, dtype=torch.float64)]))[:4]
    torch.testing.assert_close(after(keys, values, beta, state=start)[1], expected)


def test_the_update_is_stable_exactly_where_the_condition_holds():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        k = torch.randn(6, generator=generator, dtype=torch.float64)
        beta = 4 * float(torch.rand((), generator=generator, dtype=torch.float64)) - 1
        transition = torch.eye(6, dtype=torch.float64) - beta * torch.outer(k, k)
        values = torch.linalg.eigvalsh(transition)
        assert (float(values.abs().max()) <= 1 + 1e-9) == (abs(1 - beta * float(k @ k)) <= 1 + 1e-9)
        others = values[(values - (1 - beta * k @ k)).abs().argsort()][1:]
        torch.testing.assert_close(others, torch.ones(5, dtype=torch.float64))
    keys, _, beta = stream(400, 6, 3)  # with keys of length one and a sigmoid nothing grows, whatever is read
    start = torch.randn(3, 6, dtype=torch.float64)
    _, state = after(keys, torch.zeros(400, 3, dtype=torch.float64), beta, state=start)
    assert state.norm() <= start.norm()


def test_every_row_of_the_state_is_a_linear_system_of_its_own():
    keys, values, beta = stream(25, 5, 4)
    queries = torch.randn(25, 5, dtype=torch.float64)
    outputs, state = after(keys, values, beta, queries)
    for i in range(4):
        h, read = torch.zeros(5, dtype=torch.float64), []
        for k, v, strength, q in zip(keys, values, beta, queries, strict=True):
            h = (torch.eye(5, dtype=torch.float64) - strength * torch.outer(k, k)) @ h + strength * k * v[i]
            read.append(q @ h)
        torch.testing.assert_close(state[i], h)
        torch.testing.assert_close(outputs[:, i], torch.stack(read))


@pytest.mark.parametrize(("orthogonal", "factor"), [(True, 1.0), (True, 1.7), (False, 1.0)])
def test_only_orthogonal_changes_of_basis_and_their_multiples_keep_the_delta_rule(orthogonal, factor):
    """(A, B, C) -> (T^-T A T^T, T B, C T^-1) keeps outputs; the new A is I - beta k k' of a key only if T = c R.

    With c R k and c R q in place of k and q the outputs are the same where beta is divided by c^2, and so as they are
    only for c = 1 (or -1).
    """
    keys, values, beta = stream(20, 4, 1)
    queries = torch.randn(20, 4, dtype=torch.float64)
    basis = torch.randn(4, 4, dtype=torch.float64)
    basis = factor * torch.linalg.qr(basis)[0] if orthogonal else basis
    inverse, h, read = torch.linalg.inv(basis), torch.zeros(4, dtype=torch.float64), []
    symmetric = True
    for k, v, strength, q in zip(keys, values, beta, queries, strict=True):
        a = inverse.mT @ (torch.eye(4, dtype=torch.float64) - strength * torch.outer(k, k)) @ basis.mT
        symmetric = symmetric and torch.allclose(a, a.mT)
        h = a.mT @ h + basis @ (strength * k) * v[0]
        read.append(q @ inverse @ h)
    torch.testing.assert_close(torch.stack(read), after(keys, values, beta, queries)[0][:, 0])
    assert symmetric == orthogonal
    changed, _ = after(keys @ basis.mT, values, beta, queries @ basis.mT)
    assert torch.allclose(changed[:, 0], torch.stack(read)) == (orthogonal and factor == 1)
    changed, _ = after(keys @ basis.mT, values, beta / factor**2, queries @ basis.mT)
    assert torch.allclose(changed[:, 0], torch.stack(read)) == orthogonal


def test_pruning_restricts_the_regression_to_the_kept_features():
    """The small state, spread out, is the online regression over maps S'T, by autograd; it is blind to the rest."""
    keys, values, beta = stream(40, 7, 3)
    basis = random_directions(1, 3, 7, torch.Generator().manual_seed(0))[0]
    _, small = after(keys @ basis.mT, values, beta)
    torch.testing.assert_close(small, regressed(keys @ basis.mT, values, beta))
    dropped = torch.eye(7, dtype=torch.float64) - basis.mT @ basis
    assert float((small @ basis @ dropped).abs().max()) < 1e-12


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("time", [1, 3, 4, 12])
def test_the_state_lies_in_the_spans_of_its_keys_and_values(time, gated):
    keys, values, beta = stream(time, 6, 5)
    keys, values = keys @ torch.diag(torch.tensor([1.0, 1, 1, 1, 0, 0])).double(), values.clone()
    values[:, 3:] = 0
    log_decay = -torch.rand(time, dtype=torch.float64) if gated else None
    _, state = after(keys, values, beta, log_decay=log_decay)

    def outside(vectors, span):
        """What of the rows of `vectors` lies outside the span of the rows of `span`."""
        return vectors - vectors @ torch.linalg.pinv(span) @ span

    assert float(outside(state, keys).abs().max()) < 1e-10
    assert float(outside(state.mT, values).abs().max()) < 1e-10
    ranks = [int(torch.linalg.matrix_rank(matrix, rtol=1e-9)) for matrix in (state, keys, values)]
    assert ranks[0] <= min(ranks[1:]) <= time


def test_the_bounds_of_the_effective_rank_are_met_where_the_paper_says():
    generator = torch.Generator().manual_seed(0)
    left = random_directions(1, 5, 7, generator)[0].mT
    right = random_directions(1, 5, 6, generator)[0]

    def er(*values):
        spectrum = torch.tensor([*values, *[0.0] * (5 - len(values))], dtype=torch.float64)
        return float(effective_rank(singular_values(left * spectrum @ right)))

    for rank in range(1, 6):
        assert er(*[3.0] * rank) == pytest.approx(rank)  # equal singular values: the rank
        if rank > 1:
            assert 1 < er(*[3.0] * (rank - 1), 2.9) < rank  # not quite equal: less
    assert er(5.0) == pytest.approx(1)
    assert er(5.0, 0.01) > 1  # rank two: more than one


def test_principal_components_never_lower_the_utilisation_of_the_keys():
    """With the directions that `pca` keeps, on keys of every spread; the largest with the least can lower it."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        scales = torch.logspace(0, -2 * float(torch.rand((), generator=generator)), 6, dtype=torch.float64)
        keys = torch.randn(50, 6, generator=generator, dtype=torch.float64) * scales
        before = rank_utilisation(singular_values(keys))
        for kept in range(1, 7):
            rows, _ = principal_directions((keys.mT @ keys)[None], kept)
            assert float(rank_utilisation(singular_values(keys @ rows[0].mT))) >= float(before) - 1e-9
    keys = torch.diag(torch.tensor([1.0, 1, 1, 1, 1, 0.01], dtype=torch.float64))
    assert rank_utilisation(singular_values(keys[:, [0, 5]])) < rank_utilisation(singular_values(keys))
