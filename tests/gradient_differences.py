"""How far backward passes through fla's kernels, with our step for the one refused on Hopper, are from PyTorch.

For a process in which Triton's interpreter runs the kernels on a CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from fla.ops.comba import chunk_comba
from fla.ops.common import chunk_o
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

from recurrence_inputs import inputs
from slimstate.kernels import gated_gradient
from slimstate.kernels.delta_rule import comba_rule, gated_delta_rule
from slimstate.kernels.state_space import Inputs, by_fla, by_head


def difference(rules: tuple[Callable[..., Any], ...], tensors: dict[str, torch.Tensor], **options: Any) -> float:
    """Return the largest difference between outputs, last states and gradients of two rules, relative to each."""
    results = []
    for rule in rules:
        y, last = rule(**tensors, **options)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
        gradients = torch.autograd.grad((y * weights).sum() + last.sin().sum(), list(tensors.values()))
        results.append([x.detach() for x in (y, last, *gradients)])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))


def differences() -> dict[str, float]:
    """Return the largest difference of each rule."""
    gated_gradient.gated_backward_refused = lambda: True
    (patch,) = gated_gradient.PATCHES
    patch.install()
    gated_gradient.MAX_ELEMENTS = 1  # one chunk at a time
    chunk_o.chunk_bwd_kernel_dqkwg = None  # fla's own step would fail

    tensors, state = inputs(1, 70, 1, 2, 16, 16, True)
    q, k, v, beta, g, state = (x.detach().float().requires_grad_() for x in (*tensors, state))
    rule = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    final, packed = {"output_final_state": True, "scale": 0.3}, torch.tensor([0, 3, 70])
    p, keys, queries = (x.repeat_interleave(2, 2).detach().requires_grad_() for x in (0.3 * k, k, q))
    step, skip = beta.detach().requires_grad_(), torch.rand(2, requires_grad=True)
    space = {"x": v, "step": step, "g": g, "B": k, "C": q, "D": skip, "state": state}
    scans = tuple(lambda form=form, **named: form(Inputs(**named)) for form in (by_fla, by_head))
    gated, combas = (chunk_gated_delta_rule, gated_delta_rule), (chunk_comba, comba_rule)
    return {
        "gated delta rule": difference(gated, rule, state_v_first=True, **final),
        "packed": difference(gated, rule, cu_seqlens=packed, **final),
        "comba": difference(combas, {**rule, "q": queries, "k": keys, "p": p}, **final),
        "mamba-2": difference(scans, space),
    }
