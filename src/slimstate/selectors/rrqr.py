"""Choose the K channels per head that span the rest best: DRRQR, a strong rank-revealing QR of the activations.

Let M [tokens, D] be the activations of one head, S the kept columns, R the others, M_S = Q A and Q'M_R = B, with C
what of M_R lies outside the span of M_S. Exchanging i of S with j of R multiplies the volume |det A| by

    rho_ij = sqrt( U_ij^2 + (gamma_j / omega_i)^2 ),   U = A^-1 B,  gamma_j = |C e_j|,  1 / omega_i = |e_i' A^-1|.

The start is QR with column pivoting; columns are exchanged until no rho exceeds f. All of it depends on M only through
its Gram matrix G = M'M, through the table that sweeping G on S makes (symmetric, [D, D], kept columns first):

    [ -G_SS^-1        U    ]        rho_ij^2 = T_ij^2 - T_ii T_jj
    [    U'      G_RR - B'B ]

An exchange is two principal pivots of that table: O(D^2). N heads go through every step together. The table is made
afresh from G after every D exchanges and before any result is believed, so rounding cannot pile up.

`drrqr-weighted` is the same with G = M'WM, where W holds for every token the squared length of the gradient of the loss
by its activations: directions count where the loss looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slimstate.core.evidence import FIELDS
from slimstate.core.selection import Selection
from slimstate.selectors.contract import Case, Request, Selector, scored


@dataclass(frozen=True, kw_only=True)
class Pivoting:
    """Kept columns [N, K], ascending; the largest rho left and the number of exchanges made, [N]."""

    keep: Tensor
    rho: Tensor
    swaps: Tensor


def strong_rrqr(gram: Tensor, keep: int, f: float = 1.5) -> Pivoting:
    """Strong rank-revealing QR of every M with M'M = gram [N, D, D], down to rho <= f."""
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
        # without a larger volume since the last table, what is left above f is rounding
        unfinished = (worst > f) & (log_volume > volume[active])
        volume[active] = log_volume
        active, table = active[unfinished], table[unfinished]
        _exchange(table, order, active, swaps, keep, f)
    return Pivoting(keep=order[:, :keep].sort(-1).values, rho=rho, swaps=swaps)


def _conditioned(gram: Tensor) -> Tensor:
    """G scaled to a largest diagonal of one, plus the rounding of its own sum: every head then has full rank.

    Dependent and dead columns keep a residual of about that rounding, so they are exchanged out like any other.
    """
    gram = gram.double()
    gram = (gram + gram.mT) / 2
    width = gram.shape[-1]
    scale = gram.diagonal(dim1=-2, dim2=-1).amax(-1)
    gram = gram / torch.where(scale > 0, scale, torch.ones_like(scale)).view(-1, 1, 1)
    floor = width**2 * torch.finfo(gram.dtype).eps
    return gram + floor * torch.eye(width, dtype=gram.dtype, device=gram.device)


def pivoted_order(gram: Tensor, keep: int) -> Tensor:
    """The columns [N, D] with those first that QR with column pivoting takes in `keep` steps.

    Cholesky of G with diagonal pivoting: step t takes the column with the largest residual and needs one new row of R.
    """
    count, width, _ = gram.shape
    every = torch.arange(count, device=gram.device)
    residual = gram.diagonal(dim1=-2, dim2=-1).clone()
    taken_at = torch.full((count, width), keep, device=gram.device)
    rows = gram.new_zeros(count, keep, width)
    for step in range(keep):
        pivot = residual.argmax(-1)
        done = rows[:, :step]
        row = gram[every, pivot] - (done[every, :, pivot].unsqueeze(1) @ done).squeeze(1)
        row = row / row[every, pivot].clamp_min(torch.finfo(row.dtype).tiny).sqrt().unsqueeze(-1)
        rows[:, step] = row
        residual -= row.square()
        residual[every, pivot] = -torch.inf
        taken_at[every, pivot] = step
    return taken_at.argsort(dim=-1, stable=True)


def _swept(gram: Tensor, order: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """The table of G swept on the first `keep` columns of `order`, in that order, and log det G_SS."""
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
    """The largest rho of every head [n], and the places of the column that leaves and of the one that enters."""
    diagonal = table.diagonal(dim1=-2, dim2=-1)
    lever, slack = -diagonal[:, :keep], diagonal[:, keep:].clamp_min(0.0)
    squares = table[:, :keep, keep:].square().addcmul_(lever.unsqueeze(-1), slack.unsqueeze(-2))
    best, where = squares.flatten(1).max(-1)
    others = table.shape[-1] - keep
    return best.sqrt(), where // others, keep + where % others


def _exchange(table: Tensor, order: Tensor, active: Tensor, swaps: Tensor, keep: int, f: float) -> None:
    """Exchange columns of the active heads until no rho exceeds f or the table has grown old."""
    for _ in range(table.shape[-1]):
        if not len(active):
            return
        rho, leaving, entering = _best_exchange(table, keep)
        go = rho > f
        if not bool(go.all()):
            active, table, rho, leaving, entering = active[go], table[go], rho[go], leaving[go], entering[go]
        _pivot(table, leaving, -1.0)
        _pivot(table, entering, 1.0)
        every = torch.arange(len(active), device=table.device)
        table[every, leaving], table[every, entering] = table[every, entering], table[every, leaving]
        table[every, :, leaving], table[every, :, entering] = table[every, :, entering], table[every, :, leaving]
        order[active, leaving], order[active, entering] = order[active, entering], order[active, leaving]
        swaps[active] += 1
        # an exchange this large leaves a table of rounding errors: wait for a fresh one
        sound = rho < 1e5
        if not bool(sound.all()):
            active, table = active[sound], table[sound]


def _pivot(table: Tensor, column: Tensor, sign: float) -> None:
    """Sweep `column` of every table into (sign 1) or out of (sign -1) the chosen set, in place."""
    every = torch.arange(len(table), device=table.device)
    values = table[every, :, column]
    pivot = values[every, column].unsqueeze(-1)
    table.baddbmm_((values / -pivot).unsqueeze(-1), values.unsqueeze(-2))
    table[every, :, column] = table[every, column, :] = sign * values / pivot
    table[every, column, column] = -1 / pivot.squeeze(-1)


def _choosing(need: Literal["gram", "weighted"]) -> Callable[[Iterable[Case], Request], list[Selection]]:
    """Strong RRQR of such matrices of the evidence."""

    def choose(cases: Iterable[Case], request: Request) -> list[Selection]:
        """All heads of all mixers in one batch."""
        grams, heads = [], []
        for case in cases:
            query, key = (getattr(case.evidence, name, None) for name in FIELDS[need])
            grams.append(torch.stack(scored(request.score, query, key)).sum(0))
            heads.append(case.heads)
        result = strong_rrqr(torch.cat(grams).to(request.device), request.keep, request.f)
        found = (result.keep.cpu(), result.rho.cpu(), result.swaps.cpu())
        parts = zip(*(column.split(heads) for column in found), strict=True)
        return [
            Selection(keep=keep, certificate={"rho": rho.tolist(), "swaps": swaps.tolist()})
            for keep, rho, swaps in parts
        ]

    return choose


SELECTORS = (
    Selector(
        name="drrqr",
        summary="strong rank-revealing QR of keys and queries",
        needs=frozenset({"gram"}),
        choose=_choosing("gram"),
        options=("f",),
        order=50,
    ),
    Selector(
        name="drrqr-weighted",
        summary="the same, with tokens weighted by the gradient of the loss",
        needs=frozenset({"weighted"}),
        choose=_choosing("weighted"),
        options=("f",),
        order=60,
    ),
)
