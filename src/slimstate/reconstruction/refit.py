"""Refit the output projection of a cut mixer by ridge regression: where values were cut, the start of its training.

y' [tokens, columns]    input of the output projection W of the cut mixer
t  [tokens, size]       output of the uncut mixer from the same hidden states
W = argmin |y' W' - t|^2 + ridge |W - W_0|^2,    W_0 of the cut
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from slimstate.system import distributed

RIDGE = 1e-3  # relative to the mean square of the inputs


def refit(weight: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the projection [size, columns] that maps the inputs of all processes to their targets best.

    `pairs` are inputs [..., columns] and targets [..., size].
    """
    size, columns = weight.shape
    gram = torch.zeros(columns, columns, dtype=torch.float64, device=weight.device)
    products = torch.zeros(size, columns, dtype=torch.float64, device=weight.device)
    for inputs, targets in pairs:
        rows, expected = inputs.flatten(0, -2).double(), targets.flatten(0, -2).double()
        gram += rows.mT @ rows
        products += expected.mT @ rows
    distributed.sum_over_all(gram)
    distributed.sum_over_all(products)
    ridge = RIDGE * gram.diagonal().mean() + torch.finfo(torch.float32).tiny
    system = gram + ridge * torch.eye(columns, dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(system, products + ridge * weight.double(), left=False).to(weight.dtype)
