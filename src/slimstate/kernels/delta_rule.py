"""The delta rule, gated or not, in plain PyTorch: the recurrence to read, and the chunked form to run.

B batch, T time, H query/key heads, G value heads (a multiple of H), K key dim, V value dim.
q, k [B, T, H, K]; v [B, T, G, V]; beta, g [B, T, G], g the logarithm of the decay; state [B, G, K, V].

    S_t = e^{g_t} S_{t-1} + k_t u_t',   u_t = beta_t (v_t - e^{g_t} S_{t-1}' k_t),   o_t = scale S_t' q_t

With `erase` p [B, T, H, K] it is u_t = beta_t (v_t - S_{t-1}' p_t): what is erased is looked up by another vector, or
by none, and in the state before its decay.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.kernels.fla_calls import CallOptions, before_first, call, per_value_head, wide
from slimstate.kernels.patches import Backend, Patch, needs_torch_gated_rule, too_precise_for_triton


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float,
    state: Tensor | None = None,
    erase: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token after the other, as the definition says."""
    q, k, by = (per_value_head(x, v) for x in (q, k, k if erase is None else erase))
    state = before_first(k, v) if state is None else state
    outputs = []
    for t in range(q.shape[1]):
        before, state = state, state if g is None else state * g[:, t].exp()[..., None, None]
        recalled = torch.einsum("bhkv,bhk->bhv", state if erase is None else before, by[:, t])
        update = beta[:, t].unsqueeze(-1) * (v[:, t] - recalled)
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * scale)
    return torch.stack(outputs, dim=1), state


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float,
    state: Tensor | None = None,
    erase: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """The same function, C tokens at a time.

    Within a chunk with cumulated decay b, the updates solve a unit triangular system,
    (I + A) u = beta (v - e^b K S_0),  A_ts = beta_t e^{b_t - b_s} k_t'k_s for s < t: for all chunks at once, up to S_0.
    What is erased by p_t takes the place of k_t there, and the decay b_{t-1} that of b_t.
    Two products for each chunk carry S_0 on; all else, the outputs too, is done for all chunks together.
    """
    batch, time, heads, value_dim = v.shape
    key_dim = k.shape[-1]
    chunk = min(chunk, time)
    by = None if erase is None else _in_chunks(per_value_head(erase, v), chunk)
    q, k, v = (_in_chunks(x, chunk) for x in (per_value_head(q, v) * scale, per_value_head(k, v), v))
    beta = _in_chunks(beta.unsqueeze(-1), chunk)
    by = k if by is None else by
    keys_in, queries_in, keys_out = by, q, k
    scores, gram = q @ k.mT, by @ k.mT
    decay = None
    if g is not None:
        steps = _in_chunks(g.unsqueeze(-1), chunk)
        total = steps.cumsum(-2)
        seen = total if erase is None else total - steps
        between = _decay_between(total, total, 0)
        scores, gram = scores * between, gram * (between if erase is None else _decay_between(seen, total, -1))
        keys_in, queries_in = by * seen.exp(), q * total.exp()
        last = total[..., -1:, :]
        keys_out, decay = k * (last - total).exp(), last.exp()
    scores = scores.masked_fill(~_lower(chunk, 0, v.device), 0.0)
    system = (beta * gram).masked_fill(~_lower(chunk, -1, v.device), 0.0)
    solved = torch.linalg.solve_triangular(system, torch.diag_embed(beta.squeeze(-1)), upper=False, unitriangular=True)
    values, erased = solved @ v, solved @ keys_in
    if state is None:
        state = v.new_zeros(batch, heads, key_dim, value_dim)
    carried, states, updates = state.flatten(0, 1), [], []
    flat = [x.flatten(0, 1).unbind(1) for x in (values, erased, keys_out.mT)]
    decays = [None] * v.shape[2] if decay is None else decay.flatten(0, 1).unbind(1)
    for value, lost, write, fade in zip(*flat, decays, strict=True):
        states.append(carried)
        updates.append(torch.baddbmm(value, lost, carried, alpha=-1))
        carried = torch.baddbmm(carried if fade is None else carried * fade, write, updates[-1])
    before, update = (torch.stack(parts, dim=1).unflatten(0, (batch, heads)) for parts in (states, updates))
    outputs = queries_in @ before + scores @ update
    return outputs.flatten(2, 3)[:, :, :time].transpose(1, 2), carried.unflatten(0, (batch, heads))


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float,
    state: Tensor | None = None,
    erase: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Whichever form is faster for this length."""
    form = recurrence if q.shape[1] == 1 else chunked
    return form(q, k, v, beta, g, scale=scale, state=state, erase=erase)


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, D] to [B, H, N, C, D]; the zeros that fill the last chunk leave the state as it is."""
    missing = -x.shape[1] % chunk
    x = F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
    return x.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4)


def _decay_between(end: Tensor, start: Tensor, diagonal: int) -> Tensor:
    """From what was written at each token to each later one [..., C, C], from cumulated logarithms [..., C, 1]."""
    past = _lower(end.shape[-2], diagonal, end.device)
    return (end - start.mT).masked_fill(~past, -torch.inf).exp()


def _lower(size: int, diagonal: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).tril(diagonal)


def plain_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The rule without a decay, as fla's layers call it."""
    beta = torch.ones_like(q[..., 0]) if beta is None else beta
    return call(delta_rule, CallOptions.read(options), q=q, k=k, v=v, beta=beta)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The rule with a decay, as fla's layers call it."""
    known = CallOptions.read(options)
    return call(delta_rule, known, q=q, k=k, v=v, beta=known.strength(beta), g=_decay(g, known))


def _decay(g: Tensor | None, options: CallOptions) -> Tensor | None:
    """The logarithm of the decay, where the layer leaves it to the kernel to make."""
    if not options.use_gate_in_kernel:
        return g
    assert g is not None
    assert options.A_log is not None
    biased = wide(g) if options.dt_bias is None else wide(g) + wide(options.dt_bias)
    return -wide(options.A_log).exp() * F.softplus(biased)


PATCHES = (
    Patch("fla.layers.delta_net.chunk_delta_rule", plain_delta_rule, too_precise_for_triton),
    Patch("fla.layers.delta_net.fused_recurrent_delta_rule", plain_delta_rule),
    Backend(
        "fla.ops.gated_delta_rule.chunk_gated_delta_rule",
        gated_delta_rule,
        needs_torch_gated_rule,
        operation="gated_delta_rule",
    ),
    Patch("fla.layers.gated_deltanet.fused_recurrent_gated_delta_rule", gated_delta_rule),
    Patch("fla.layers.gated_deltaproduct.fused_recurrent_gated_delta_rule", gated_delta_rule),
)
