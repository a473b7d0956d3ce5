"""Strong rank-revealing QR: its bound, its optimum on small cases, and matrices that defeat plain pivoting."""

from itertools import combinations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimstate.selectors.rrqr import pivoted_order, strong_rrqr


def gram_of(matrix: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(matrix.T @ matrix).unsqueeze(0)


def random_matrix(rows: int, width: int, seed: int, spread: float = 0.0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.standard_normal((rows, width)) * 10 ** (-spread * np.arange(width) / width)


def kahan(size: int, c: float = 0.285) -> np.ndarray:
    """The matrix on which QR with column pivoting makes no exchange and leaves a tiny last singular value inside."""
    s = np.sqrt(1 - c**2)
    upper = np.triu(-c * np.ones((size, size)), 1) + np.eye(size)
    return np.diag(s ** np.arange(size)) @ upper * (1 - 1e-7 * np.arange(size))


def all_rhos(matrix: np.ndarray, keep: list[int]) -> np.ndarray:
    """rho_ij of the definition, from a QR factorisation of the columns in order."""
    rest = [j for j in range(matrix.shape[1]) if j not in keep]
    r = np.linalg.qr(matrix[:, keep + rest], mode="r")
    k = len(keep)
    a, b, c = r[:k, :k], r[:k, k:], r[k:, k:]
    inverse = np.linalg.inv(a)
    gamma = np.linalg.norm(c, axis=0)
    return np.sqrt((inverse @ b) ** 2 + (np.linalg.norm(inverse, axis=1)[:, None] * gamma[None, :]) ** 2)


def volume(matrix: np.ndarray, keep) -> float:
    return float(np.prod(np.linalg.svd(matrix[:, list(keep)], compute_uv=False)))


SEEDS = st.integers(0, 9999)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.data(), st.sampled_from([1.0, 1.1, 1.5, 3.0]), SEEDS, st.sampled_from([0.0, 2.0]))
def test_no_exchange_is_left_that_grows_the_volume_more_than_f(width, data, f, seed, spread):
    keep = data.draw(st.integers(1, width - 1))
    matrix = random_matrix(30, width, seed, spread)
    found = strong_rrqr(gram_of(matrix), keep, f)
    chosen = found.keep[0].tolist()
    rho = all_rhos(matrix, chosen)
    assert rho.max() <= f * (1 + 1e-6)
    assert float(found.rho[0]) == pytest.approx(rho.max(), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(width=st.integers(3, 8), data=st.data(), seed=SEEDS)
def test_the_volume_is_within_its_bound_of_the_best_of_all_subsets(width, data, seed):
    keep = data.draw(st.integers(1, width - 1))
    matrix = random_matrix(20, width, seed, 1.0)
    f = 1.2
    chosen = strong_rrqr(gram_of(matrix), keep, f).keep[0].tolist()
    best = max(volume(matrix, subset) for subset in combinations(range(width), keep))
    # entrywise rho <= f bounds every k x k exchange by Hadamard's inequality
    assert volume(matrix, chosen) >= best / (f * np.sqrt(keep)) ** keep


@pytest.mark.parametrize("seed", range(5))
def test_the_start_is_qr_with_column_pivoting(seed):
    matrix = random_matrix(60, 24, seed, 1.0)
    _, pivots = scipy.linalg.qr(matrix, mode="r", pivoting=True)
    assert pivoted_order(gram_of(matrix), 10)[0, :10].tolist() == pivots[:10].tolist()


def test_kahan_matrices_need_the_exchange_that_pivoting_misses():
    matrix = kahan(40)
    keep = 39
    start = pivoted_order(gram_of(matrix), keep)[0, :keep].tolist()
    assert all_rhos(matrix, start).max() > 100
    found = strong_rrqr(gram_of(matrix), keep, 1.5)
    chosen = found.keep[0].tolist()
    assert all_rhos(matrix, chosen).max() <= 1.5 + 1e-6
    smallest = [np.linalg.svd(matrix[:, columns], compute_uv=False)[-1] for columns in (start, chosen)]
    assert smallest[1] > 100 * smallest[0]


def test_many_kahan_blocks_need_more_than_twenty_exchanges():
    blocks, size = 30, 12
    matrix = scipy.linalg.block_diag(*[kahan(size, 0.6) * (1 + 1e-3 * n) for n in range(blocks)])
    found = strong_rrqr(gram_of(matrix), blocks * (size - 1), 1.5)
    assert int(found.swaps[0]) > 20
    assert all_rhos(matrix, found.keep[0].tolist()).max() <= 1.5 + 1e-6


def test_heads_in_a_batch_do_not_disturb_each_other():
    matrices = [random_matrix(50, 20, seed, seed % 3) for seed in range(12)]
    grams = torch.cat([gram_of(matrix) for matrix in matrices])
    together = strong_rrqr(grams, 8, 1.05)
    for n in range(len(matrices)):
        alone = strong_rrqr(grams[n : n + 1], 8, 1.05)
        assert together.keep[n].tolist() == alone.keep[0].tolist()
        assert int(together.swaps[n]) == int(alone.swaps[0])


def test_dependent_columns_are_not_kept_together():
    matrix = random_matrix(40, 10, 0)
    matrix[:, 7] = matrix[:, 2] + matrix[:, 3]
    matrix[:, 8] = 2 * matrix[:, 1]
    chosen = strong_rrqr(gram_of(matrix), 8, 1.5).keep[0].tolist()
    assert np.linalg.matrix_rank(matrix[:, chosen]) == 8


def test_dead_columns_and_dead_heads_are_survived():
    matrix = random_matrix(40, 10, 0)
    matrix[:, [0, 4, 5]] = 0
    grams = torch.cat([gram_of(matrix), torch.zeros(1, 10, 10, dtype=torch.float64)])
    found = strong_rrqr(grams, 7, 1.5)
    assert found.keep[0].tolist() == [1, 2, 3, 6, 7, 8, 9]
    assert found.keep[1].tolist() == list(range(7))
    assert found.rho.isfinite().all()
    fewer_live = strong_rrqr(grams, 9, 1.5)
    assert set(range(10)) - set(fewer_live.keep[0].tolist()) <= {0, 4, 5}


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_scale_does_not_matter(scale):
    gram = gram_of(random_matrix(40, 16, 3, 2.0))
    assert strong_rrqr(gram * scale, 6).keep.tolist() == strong_rrqr(gram, 6).keep.tolist()


def test_swaps_can_be_limited():
    """As many as allowed are made, and they are the first of those that are made without a limit."""
    gram = gram_of(scipy.linalg.block_diag(*(kahan(12) * scale for scale in (1, 1.2, 1.4, 1.6)))).expand(3, -1, -1)
    whole = strong_rrqr(gram, 36, 1.0)
    start = pivoted_order(gram, 36)[:, :36].sort(-1).values
    assert int(whole.swaps.min()) > 2
    for limit in (0, 2, 1000):
        limited = strong_rrqr(gram, 36, 1.0, limit)
        assert limited.swaps.tolist() == [min(limit, int(whole.swaps[0]))] * 3
        expected = {0: start, 1000: whole.keep}.get(limit)
        assert expected is None or limited.keep.equal(expected)
