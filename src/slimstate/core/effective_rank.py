"""Measure how much of a state is used and what that means for reading it: the paper's quantities and bounds.

S [..., V, K] is a state that maps queries of R^K to values of R^V, d = min(V, K), with singular values
s_1 >= ... >= s_d; w_1 is its first right singular vector. q is a query, n noise on it. Everything is float64 and
batched over leading dimensions. The zero matrix has effective rank and utilisation 0 and an infinite condition number.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps


def singular_values(matrix: Tensor) -> Tensor:
    """Return s_1 >= ... >= s_d of every matrix [..., m, n]."""
    return torch.linalg.svdvals(matrix.double())


def effective_rank(values: Tensor) -> Tensor:
    """Return er(S) = |S|_F^2 / |S|_2^2 = sum_i s_i^2 / s_1^2 of singular values [..., d]."""
    largest = values[..., :1]
    return torch.where(largest > 0, values / largest, 0.0).square().sum(-1)


def rank_utilisation(values: Tensor) -> Tensor:
    """Return u(S) = er(S) / d."""
    return effective_rank(values) / values.shape[-1]


def algebraic_rank(values: Tensor, eps: float = EPS) -> Tensor:
    """Return how many singular values exceed the rounding error of s_1 at precision `eps`."""
    return (values > values[..., :1] * values.shape[-1] * eps).sum(-1)


def condition_number(values: Tensor, eps: float = EPS) -> Tensor:
    """Return kappa(S) = s_1 / s_d; infinite if s_d is below the rounding error of s_1."""
    full = algebraic_rank(values, eps) == values.shape[-1]
    return torch.where(full, values[..., 0] / values[..., -1], torch.inf)


def gram_condition_number(gram: Tensor) -> Tensor:
    """Return kappa(X) from the Gram matrix X'X [..., K, K]; infinite if that is singular to working precision."""
    return condition_number(torch.linalg.eigvalsh(gram.double()).flip(-1)).sqrt()


@dataclass(frozen=True)
class Bounds:
    """The bounds of a quantity."""

    lower: Tensor
    upper: Tensor

    def hold(self, value: Tensor, slack: float = 1e-9) -> Tensor:
        """Return whether the bounds hold, up to a relative rounding error; NaN, a ratio of zeros, breaks none."""
        return ~((value < self.lower * (1 - slack)) | (value > self.upper * (1 + slack)))


def state_bound(state: Tensor, key_gram: Tensor) -> Tensor:
    """Return nu(U) / kappa^2(K) <= er(S) for a state whose rows are in the span of its keys, from G = K'K.

    Plain linear attention writes S = V'K, keys K [..., T, K], values V [..., T, V], and nu(V) = er(P V), P the
    projection on the column space of K. If K does not have full column rank, kappa is that of its non-zero singular
    values: every step of the proof is in the column space. DeltaNet, gated or not, writes S = U'K with updates U in
    place of values. P U = K G^+ S', so that nu(U) is the effective rank of S (G^+)^(1/2), and the bound holds exactly,
    not as an approximation.
    """
    s, q = torch.linalg.eigh(key_gram.double())
    s, q = s.flip(-1).clamp_min(0), q.flip(-1)
    inside = torch.arange(s.shape[-1], device=s.device) < algebraic_rank(s).unsqueeze(-1)
    inverse_root = torch.where(inside, s, 1.0).rsqrt() * inside
    updates = (state.double() @ q) * inverse_root.unsqueeze(-2)
    nu, smallest = effective_rank(singular_values(updates)), torch.where(inside, s, torch.inf).amin(-1)
    return torch.where(s[..., 0] > 0, nu * smallest / s[..., 0], 0.0)


@dataclass(frozen=True)
class Memory:
    """A state S [..., V, K], decomposed once, and the effect of a noisy query on what is read."""

    state: Tensor
    values: Tensor
    principal: Tensor

    @classmethod
    def of(cls, state: Tensor) -> "Memory":
        state = state.double()
        _, values, rows = torch.linalg.svd(state, full_matrices=False)
        return cls(state, values, rows[..., 0, :])

    @property
    def effective_rank(self) -> Tensor:
        return effective_rank(self.values)

    @property
    def kappa(self) -> Tensor:
        """kappa of S as a map of all of R^K: infinite if V < K, because then S maps some direction to zero."""
        if self.state.shape[-2] < self.state.shape[-1]:
            return torch.full_like(self.values[..., 0], torch.inf)
        return condition_number(self.values)

    def amplification(self, query: Tensor, noise: Tensor) -> Tensor:
        """Return R = (|S n| / |S q|) / (|n| / |q|), the relative error of the output over that of the query."""
        return self._gain(noise) / self._gain(query)

    def amplification_bounds(self, query: Tensor, noise: Tensor) -> Bounds:
        """Bound delta / sqrt(er(S)) <= R <= sqrt(er(S)) / gamma, delta = |n'w_1| / |n|, gamma = |q'w_1| / |q|."""
        root = self.effective_rank.sqrt()
        delta = self._alignment(noise)
        return Bounds(torch.where(root > 0, delta / root, 0.0), self._over_alignment(root, query))

    def condition_bounds(self) -> Bounds:
        """Bound 1 / kappa(S) <= R <= kappa(S)."""
        return Bounds(1 / self.kappa, self.kappa)

    def expected_error(self, query: Tensor) -> Tensor:
        """Return E |S n| / |S q| for |q| = 1 and n ~ N(0, I), by quadrature, not by sampling.

        With Q = |S n|^2 = sum_i s_i^2 z_i^2,  E sqrt(Q) = (1 / (2 sqrt(pi))) integral of (1 - E e^{-tQ}) t^{-3/2} dt
        and E e^{-tQ} = prod_i (1 + 2 t s_i^2)^{-1/2}. In x = log t the trapezoidal rule converges exponentially.
        """
        step = 0.5
        x = torch.arange(-90.0, 90.0, step, dtype=torch.float64, device=self.values.device)
        largest = self.values[..., :1]
        squares = torch.where(largest > 0, self.values / largest, 0.0).square()
        log_transform = -0.5 * torch.log1p(2 * x.exp() * squares.unsqueeze(-1)).sum(-2)
        norm = (-torch.expm1(log_transform) * (-x / 2).exp()).sum(-1) * step / (2 * math.sqrt(math.pi))
        return largest.squeeze(-1) * norm / self._gain(query)

    def expected_bounds(self, query: Tensor) -> Bounds:
        """Bound sqrt(2 / (pi er(S))) <= E |S n| / |S q| <= mu sqrt(er(S)) / gamma for |q| = 1, n ~ N(0, I).

        mu = sqrt(2) Gamma((d + 1) / 2) / Gamma(d / 2), the mean norm of the noise in the row space of S.
        """
        root, mu = self.effective_rank.sqrt(), mean_norm(self.values.shape[-1])
        return Bounds(torch.where(root > 0, math.sqrt(2 / math.pi) / root, 0.0), self._over_alignment(mu * root, query))

    def expected_condition_bounds(self) -> Bounds:
        """Bound mu / kappa(S) <= E |S n| / |S q| <= mu kappa(S), mu the mean norm of the noise in R^K."""
        mu = mean_norm(self.state.shape[-1])
        return Bounds(mu / self.kappa, mu * self.kappa)

    def _gain(self, x: Tensor) -> Tensor:
        """Return |S x| / |x|."""
        x = x.double()
        return torch.linalg.vecdot(self.state, x.unsqueeze(-2)).norm(dim=-1) / x.norm(dim=-1)

    def _over_alignment(self, root: Tensor, query: Tensor) -> Tensor:
        gamma = self._alignment(query)
        return torch.where((gamma > 0) & (root > 0), root / gamma, torch.inf)

    def _alignment(self, x: Tensor) -> Tensor:
        """Return |x'w_1| / |x|."""
        x = x.double()
        return torch.linalg.vecdot(x, self.principal).abs() / x.norm(dim=-1)


def mean_norm(size: int) -> float:
    """Return E |n| for n ~ N(0, I) in R^size: sqrt(2) Gamma((size + 1) / 2) / Gamma(size / 2)."""
    return math.sqrt(2) * math.exp(math.lgamma((size + 1) / 2) - math.lgamma(size / 2))
