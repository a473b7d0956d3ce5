"""Choose K orthonormal directions per head instead of K channels: principal components, and two controls.

G [H, D, D] is the Gram matrix of the keys, of the queries, or of both, over all calibration tokens: N times their
uncentred covariance. The K eigenvectors of its largest eigenvalues keep the largest share of the variance; the
certificate has the share that is lost. Queries and keys are those that enter the state, after convolution and
activation; a cut rotates the projections before them.

There are two versions. `pca` follows the paper's text: the sum of k k', uncentred, of keys after the activation; the
text does not say whether they are normalised. `pca-released` follows the paper's released code: keys divided by their
length, as they enter the delta rule, and centred, the sum of (k - m) (k - m)'; the mean m is not used otherwise. For
keys and queries together all rows are pooled, with one mean; the code uses keys, `score` k.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from slimstate.core.evidence import Evidence
from slimstate.core.selection import Basis
from slimstate.selectors.contract import Case, Request, Selector, scored


def principal_directions(gram: Tensor, keep: int, *, least: bool = False) -> tuple[Tensor, Tensor]:
    """Return the `keep` eigenvectors [H, K, D] of the largest (or least) eigenvalues, and the variance lost [H]."""
    wide = gram.double()
    values, vectors = torch.linalg.eigh((wide + wide.mT) / 2)
    values, rows = values.clamp_min(0), vectors.mT
    places = slice(None, keep) if least else slice(values.shape[-1] - keep, None)
    total = values.sum(-1)
    share = torch.where(total > 0, values[:, places].sum(-1) / total, 1.0)
    rows = rows[:, places].flip(1)
    largest = rows.gather(-1, rows.abs().argmax(-1, keepdim=True))  # is made positive, which fixes the sign
    return rows * torch.where(largest < 0, -1.0, 1.0), (1 - share).clamp_min(0)


def random_directions(heads: int, keep: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw orthonormal rows [H, K, D] uniformly: by QR of normal numbers with a positive diagonal of R."""
    q, r = torch.linalg.qr(torch.randn(heads, width, keep, generator=generator, dtype=torch.float64))
    return (q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)).mT


def uncentred(evidence: Evidence, score: str) -> Tensor:
    """Return G of the activations as they are."""
    return torch.stack(scored(score, evidence.query_gram, evidence.key_gram)).sum(0)


def centred(evidence: Evidence, score: str) -> Tensor:
    """Return G of the normalised and centred activations: G - s s' / N with their sum s."""
    moments = torch.stack(scored(score, evidence.query_moments, evidence.key_moments)).sum(0)
    total, count = moments[:, -1:, :-1], moments[:, -1:, -1:]
    return moments[:, :-1, :-1] - total.mT @ total / count


def components(
    spread: Callable[[Evidence, str], Tensor], *, least: bool
) -> Callable[[Iterable[Case], Request], list[Basis]]:
    def choose(cases: Iterable[Case], request: Request) -> list[Basis]:
        bases = []
        for case in cases:
            if case.evidence is None:
                raise ValueError("principal components need evidence with `gram` or `moments`, got none")
            rows, lost = principal_directions(spread(case.evidence, request.score), request.keep, least=least)
            bases.append(Basis(rows=rows.float().cpu(), certificate={"variance_lost": lost.tolist()}))
        return bases

    return choose


def choose_random(cases: Iterable[Case], request: Request) -> list[Basis]:
    generator = torch.Generator().manual_seed(request.seed)
    return [Basis(rows=random_directions(case.heads, request.keep, case.width, generator).float()) for case in cases]


SELECTORS = (
    Selector(
        name="pca", summary="principal components: a rotation, not a choice of channels", needs=frozenset({"gram"}),
        choose=components(uncentred, least=False), rotates=True, order=60,
    ),
    Selector(
        name="pca-adversarial", summary="the components of least variance, the control of pca",
        needs=frozenset({"gram"}), choose=components(uncentred, least=True), rotates=True, order=70,
    ),
    Selector(
        name="pca-released", summary="pca as in the paper's code, of normalised and centred activations",
        needs=frozenset({"moments"}), choose=components(centred, least=False), rotates=True, order=72,
    ),
    Selector(
        name="pca-released-adversarial", summary="the control of pca-released", needs=frozenset({"moments"}),
        choose=components(centred, least=True), rotates=True, order=74,
    ),
    Selector(
        name="random-rotation", summary="random directions, the control", needs=frozenset(), choose=choose_random,
        rotates=True, order=80,
    ),
)  # fmt: skip
