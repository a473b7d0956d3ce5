"""Methods that choose value channels, each channel by itself: energy, gradient, L1, and random channels.

y is the input of the output projection W_o, after the norm and the gate; W_v are the rows that compute the values. All
are [H, V, ...] by channel; a channel may have several columns of W_o, one for each head that shares its values.
"""

from torch import Tensor

from slimstate.selectors.contract import Case, Request, Selector
from slimstate.selectors.ranking import best_of, choose_random


def energy(case: Case, request: Request) -> Tensor:
    """Return s_j = sum over the columns of the channel of E[y^2] |W_o[:, column]|^2, [H, V]."""
    if case.evidence is None or case.evidence.output_square is None or case.output_weight is None:
        raise ValueError("energy needs evidence with `output` and the weights, got none")
    squares = case.evidence.output_square  # [H, V, copies]
    columns = case.output_weight.double().unflatten(-1, (squares.shape[-1], -1))
    return (columns.square().sum(-1) * squares).sum(-1)


def saliency(case: Case, request: Request) -> Tensor:
    """Return s_j = sum_i |W_o[i, j] dL/dW_o[i, j]|, [H, V]."""
    if case.evidence is None or case.evidence.output_gradient is None or case.output_weight is None:
        raise ValueError("grad needs evidence with `output gradient` and the weights, got none")
    return (case.output_weight.double() * case.evidence.output_gradient.double()).abs().sum(-1)


def magnitude(case: Case, request: Request) -> Tensor:
    """Return s_j = sum_i |W_v[j, i]| + sum_i |W_o[i, j]|, [H, V]."""
    if case.value_weight is None or case.output_weight is None:
        raise ValueError("l1 needs weights, got none")
    return case.value_weight.double().abs().sum(-1) + case.output_weight.double().abs().sum(-1)


VALUE_METHODS = {
    selector.name: selector
    for selector in (
        Selector(
            name="energy", summary="largest share of the output", needs=frozenset({"weight", "output"}),
            choose=best_of(energy),
        ),
        Selector(
            name="grad", summary="largest first-order effect on the loss",
            needs=frozenset({"weight", "output gradient"}), choose=best_of(saliency),
        ),
        Selector(name="l1", summary="largest weights", needs=frozenset({"weight"}), choose=best_of(magnitude)),
        Selector(name="random", summary="random channels, the control", needs=frozenset(), choose=choose_random),
    )
}  # fmt: skip
