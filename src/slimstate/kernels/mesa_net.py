"""MesaNet: every query is first solved for in the regularised products of all keys so far, then reads the state.

B batch, T time, H heads, K key dim, V value dim. q, k [B, T, H, K]; v [B, T, H, V]; g, the logarithm of the decay, and
the strengths beta [B, T, H]; lamb [H, K] is positive; states A [B, H, K, K] and S [B, H, K, V].

    A_t = e^{g_t} A_{t-1} + beta_t k_t k_t',   S_t = e^{g_t} S_{t-1} + beta_t k_t v_t'
    o_t = S_t' (A_t + diag(lamb))^-1 q_t

As in fla's kernels, a fixed number of steps of conjugate gradients solves for each query; those kernels also round
queries and keys to float16, and S between chunks to bfloat16.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slimstate.kernels.fla_calls import Packing, unit, wide
from slimstate.kernels.patches import Patch

CHUNK = 64
TINY = 1e-5  # what fla's kernels add to denominators


def solve(product: Callable[[Tensor], Tensor], q: Tensor, start: Tensor, steps: int) -> Tensor:
    """Return x whose product with a positive definite matrix is about q, by conjugate gradients from `start`."""
    x, rest = start, q - product(start)
    direction, size = rest, rest.square().sum(-1, keepdim=True)
    for _ in range(steps):
        change = product(direction)
        rate = size / ((direction * change).sum(-1, keepdim=True) + TINY)
        x, rest = x + rate * direction, rest - rate * change
        before, size = size, rest.square().sum(-1, keepdim=True)
        direction = rest + size / (before + TINY) * direction
    return x


def chunk(inputs: list[Tensor], lamb: Tensor, states: list[Tensor], steps: int) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs [B, H, C, V] of a chunk and the states after it; q, k, v, g and beta are [B, H, C, ...]."""
    q, k, v, g, beta = inputs
    total = g.cumsum(-1).unsqueeze(-1)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    weights = (total - total.mT).masked_fill(later, -torch.inf).exp() * beta.unsqueeze(-2)

    def read(x: Tensor, state: Tensor, written: Tensor) -> Tensor:
        return (x * total.exp()) @ state + (x @ k.mT * weights) @ written

    x = solve(lambda x: read(x, states[0], k) + lamb.unsqueeze(-2) * x, q, torch.zeros_like(q), steps)
    end = total[..., -1:, :]
    writes = (k * (end - total).exp() * beta.unsqueeze(-1)).mT
    after = [state * end.exp() + writes @ written for state, written in zip(states, (k, v), strict=True)]
    return read(x, states[1], v), after


def mesa_net(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lamb: Tensor, max_CG_iteration: int = 30, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute MesaNet as fla's layers call it."""
    packing, dtype = Packing(options.get("cu_seqlens")), v.dtype
    q, k = (unit(wide(x)) if options.get("use_qk_l2norm_in_kernel") else wide(x) for x in (q, k))
    inputs = [packing.pad(wide(x)).transpose(1, 2) for x in (q, k, v, g, beta)]
    shape = (*inputs[0].shape[:2], q.shape[-1])
    states = [
        inputs[0].new_zeros(*shape, size) if options.get(name) is None else options[name].to(inputs[0])
        for name, size in (("h_kk_init", q.shape[-1]), ("h_kv_init", v.shape[-1]))
    ]
    outputs = []
    for start in range(0, inputs[0].shape[2], CHUNK):
        part = [x[:, :, start : start + CHUNK] for x in inputs]
        output, states = chunk(part, wide(lamb), states, max_CG_iteration)
        outputs.append(output)
    o = packing.pack(torch.cat(outputs, 2).transpose(1, 2)).to(dtype)
    return (o, states[0], states[1]) if options.get("output_final_state") else (o, None, None)


def one_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lamb: Tensor, beta: Tensor, max_CG_iteration: int = 30, **states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one token as fla's layers call it, with tensors [B, H, ...]; the solution starts from the diagonal."""
    q, k, v, fade = wide(q), wide(k), wide(v), wide(g).exp()[..., None, None]
    written = (k * wide(beta).unsqueeze(-1)).unsqueeze(-1)
    keys, values = (states[name] * fade + written * x.unsqueeze(-2) for name, x in (("prev_h_kk", k), ("prev_h_kv", v)))

    def read(x: Tensor, state: Tensor) -> Tensor:
        return (x.unsqueeze(-2) @ state).squeeze(-2)

    start = q / (keys.diagonal(dim1=-2, dim2=-1) + lamb + TINY)
    x = solve(lambda x: read(x, keys) + lamb * x, q, start, max_CG_iteration)
    return read(x, values), keys, values


def unit_length(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Divide each vector by its length, as the layers of fla do before a single token."""
    return unit(wide(x)).to(x.dtype)


PATCHES = (
    Patch("fla.layers.mesa_net.chunk_mesa_net", mesa_net),
    Patch("fla.layers.mesa_net.mesa_net_decoding_one_step", one_step),
    Patch("fla.layers.mesa_net.l2_norm", unit_length),
)
