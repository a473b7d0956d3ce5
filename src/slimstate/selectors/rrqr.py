"""Choose the K channels per head that span the rest best: DRRQR, a strong rank-revealing QR of the activations.

Let M [tokens, D] be the activations of one head, S the kept columns, R the others, M_S = Q A, Q'M_R = B, and C the
part of M_R outside the span of M_S. Exchanging i of S with j of R multiplies the volume |det A| by

    rho_ij = sqrt( U_ij^2 + (gamma_j / omega_i)^2 ),   U = A^-1 B,  gamma_j = |C e_j|,  1 / omega_i = |e_i' A^-1|.

The algorithm starts from QR with column pivoting and exchanges columns until no rho exceeds f. It depends on M only
through its Gram matrix G = M'M, by the table of G swept on S (symmetric, [D, D], kept columns first):

    [ -G_SS^-1        U    ]        rho_ij^2 = T_ij^2 - T_ii T_jj
    [    U'      G_RR - B'B ]

An exchange is two principal pivots of that table: O(D^2). N heads are computed in one batch. The table is computed
again from G after every D exchanges and before a result is returned, so that rounding errors do not accumulate.

`drrqr-weighted` is the same with G = M'WM, where W has for every token the squared length of the gradient of the loss
with respect to its activations: tokens count as much as the loss depends on them.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from slimstate.core.evidence import FIELDS
from slimstate.core.selection import Selection
from slimstate.selectors.contract import Case, Request, Selector, scored
from slimstate.system.value import Value


class Pivoting(Value):
    """The kept columns [N, K], ascending; the largest remaining rho and the number of exchanges, [N]."""

    keep: Tensor
    rho: Tensor
    swaps: Tensor


def strong_rrqr(gram: Tensor, keep: int, f: float = 1.5, max_swaps: int | None = None) -> Pivoting:
    """Return a strong rank-revealing QR of every M with M'M = gram [N, D, D], such that rho <= f.

    `max_swaps` limits the exchanges of every M.
    """
    count, width, _ = gram.shape
    gram = _conditioned(gram)
    order = pivoted_order(gram, keep)
    swaps = torch.zeros(count, dtype=torch.long, device=gram.device)
    rho = torch.ones(count, dtype=gram.dtype, device=gram.device)
    volume = torch.full_like(rho, -torch.inf)
    active = torch.arange(count, device=gram.device)
    while len(active) and keep < width:
        table, log_volume = _swept(gram[active], order[active], keep)
        worst, _, _ = _best_exchange(table, keep)
        rho[active] = worst
        # if the volume has not grown since the last table, a rho above f is a rounding error
        unfinished = (worst > f) & (log_volume > volume[active])
        if max_swaps is not None:
            unfinished &= swaps[active] < max_swaps
        volume[active] = log_volume
        active, table = active[unfinished], table[unfinished]
        _exchange(table, order, active, swaps, keep, f, max_swaps)
    return Pivoting(keep=order[:, :keep].sort(-1).values, rho=rho, swaps=swaps)


def _conditioned(gram: Tensor) -> Tensor:
    """Return G scaled to a largest diagonal of one, plus its rounding error, so that every head has full rank.

    Dependent and dead columns have a residual of about that error, so they are exchanged like any other.
    """
    gram = gram.double()
    gram = (gram + gram.mT) / 2
    width = gram.shape[-1]
    scale = gram.diagonal(dim1=-2, dim2=-1).amax(-1)
    gram = gram / torch.where(scale > 0, scale, torch.ones_like(scale)).view(-1, 1, 1)
    floor = width**2 * torch.finfo(gram.dtype).eps
    return gram + floor * torch.eye(width, dtype=gram.dtype, device=gram.device)


def pivoted_order(gram: Tensor, keep: int) -> Tensor:
    """Return the columns [N, D], first those that QR with column pivoting chooses in `keep` steps.

    This is Cholesky of G with diagonal pivoting: a step chooses the column with the largest residual and computes one
    row of R.
    """
    count, width, _ = gram.shape
    every = torch.arange(count, device=gram.device)
    residual = gram.diagonal(dim1=-2, dim2=-1).clone()
    step_of = torch.full((count, width), keep, device=gram.device)
    rows = gram.new_zeros(count, keep, width)
    for step in range(keep):
        pivot = residual.argmax(-1)
        above = rows[:, :step]
        row = gram[every, pivot] - (above[every, :, pivot].unsqueeze(1) @ above).squeeze(1)
        row = row / row[every, pivot].clamp_min(torch.finfo(row.dtype).tiny).sqrt().unsqueeze(-1)
        rows[:, step] = row
        residual -= row.square()
        residual[every, pivot] = -torch.inf
        step_of[every, pivot] = step
    return step_of.argsort(dim=-1, stable=True)


def _swept(gram: Tensor, order: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Return the table of G swept on the first `keep` columns of `order`, in that order, and log det G_SS."""
    gram = gram.gather(1, order.unsqueeze(-1).expand_as(gram)).gather(2, order.unsqueeze(-2).expand_as(gram))
    factor = torch.linalg.cholesky(gram[:, :keep, :keep])
    identity = torch.eye(keep, dtype=gram.dtype, device=gram.device).expand_as(factor)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    coefficients = inverse @ gram[:, :keep, keep:]
    loadings = inverse.mT @ coefficients
    gram[:, :keep, :keep] = -(inverse.mT @ inverse)
    gram[:, :keep, keep:] = loadings
    gram[:, keep:, :keep] = loadings.mT
    gram[:, keep:, keep:] -= coefficients.mT @ coefficients
    return gram, 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _best_exchange(table: Tensor, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest rho of every head [n], and the columns that leave and enter."""
    diagonal = table.diagonal(dim1=-2, dim2=-1)
    lever, slack = -diagonal[:, :keep], diagonal[:, keep:].clamp_min(0.0)
    squares = table[:, :keep, keep:].square().addcmul_(lever.unsqueeze(-1), slack.unsqueeze(-2))
    best, where = squares.flatten(1).max(-1)
    others = table.shape[-1] - keep
    return best.sqrt(), where // others, keep + where % others


def _exchange(
    table: Tensor, order: Tensor, active: Tensor, swaps: Tensor, keep: int, f: float, max_swaps: int | None
) -> None:
    """Exchange columns of the active heads until no rho exceeds f or the table must be computed again."""
    for _ in range(table.shape[-1]):
        if not len(active):
            return
        rho, leaving, entering = _best_exchange(table, keep)
        above = rho > f if max_swaps is None else (rho > f) & (swaps[active] < max_swaps)
        if not bool(above.all()):
            active, table, rho = active[above], table[above], rho[above]
            leaving, entering = leaving[above], entering[above]
        _pivot(table, leaving, -1.0)
        _pivot(table, entering, 1.0)
        every = torch.arange(len(active), device=table.device)
        table[every, leaving], table[every, entering] = table[every, entering], table[every, leaving]
        table[every, :, leaving], table[every, :, entering] = table[every, :, entering], table[every, :, leaving]
        order[active, leaving], order[active, entering] = order[active, entering], order[active, leaving]
        swaps[active] += 1
        accurate = rho < 1e5  # after an exchange this large the table is dominated by rounding errors: compute it again
        if not bool(accurate.all()):
            active, table = active[accurate], table[accurate]


def _pivot(table: Tensor, column: Tensor, sign: float) -> None:
    """Sweep `column` of every table into (sign 1) or out of (sign -1) the kept set, in place."""
    every = torch.arange(len(table), device=table.device)
    values = table[every, :, column]
    pivot = values[every, column].unsqueeze(-1)
    table.baddbmm_((values / -pivot).unsqueeze(-1), values.unsqueeze(-2))
    table[every, :, column] = table[every, column, :] = sign * values / pivot
    table[every, column, column] = -1 / pivot.squeeze(-1)


def _choose_by(need: Literal["gram", "weighted"]) -> Callable[[Iterable[Case], Request], list[Selection]]:
    """Return the `choose` of a selector by strong RRQR of these matrices of the evidence."""

    def choose(cases: Iterable[Case], request: Request) -> list[Selection]:
        grams, heads = [], []
        for case in cases:
            query, key = (getattr(case.evidence, name, None) for name in FIELDS[need])
            grams.append(torch.stack(scored(request.score, query, key)).sum(0))
            heads.append(case.heads)
        result = strong_rrqr(torch.cat(grams).to(request.device), request.keep, request.f, request.swaps)
        columns = (result.keep.cpu(), result.rho.cpu(), result.swaps.cpu())
        parts = zip(*(column.split(heads) for column in columns), strict=True)
        return [
            Selection(keep=keep, certificate={"rho": rho.tolist(), "swaps": swaps.tolist()})
            for keep, rho, swaps in parts
        ]

    return choose


SELECTORS = (
    Selector(
        name="drrqr", summary="strong rank-revealing QR of keys and queries", needs=frozenset({"gram"}),
        choose=_choose_by("gram"), options=("f", "swaps"), order=50,
    ),
    Selector(
        name="drrqr-weighted", summary="the same, with tokens weighted by the gradient of the loss",
        needs=frozenset({"weighted"}), choose=_choose_by("weighted"), options=("f", "swaps"), order=60,
    ),
)  # fmt: skip
